"""Why a gate refuses: the fixed list of codes, each with its sentence, for the silo's operator and
for whoever asked.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "size": "The frame is longer than any query about this model can be.",
    "malformed": "The frame is not a query in the one form that this protocol has.",
    "version": "The frame speaks another version of the protocol.",
    "signature": "The frame is unsigned, or its signature does not belong to its key and content.",
    "asker": "The key that signed the query is not one that the policy lists.",
    "silo": "The query was signed for another silo than this one.",
    "expired": "The policy's last day is over.",
    "paused": "The silo's operator has paused the gate.",
    "model": "The query is about another model, loss or library version than the silo approved.",
    "statistic": "The policy does not allow this statistic.",
    "sampling": "The policy does not allow this way of drawing batches.",
    "rule": (
        "The ledger's rule has no price for such a release; it was fixed when the ledger was made."
    ),
    "clip": "The clip threshold is outside the policy's range.",
    "noise": (
        "The noise multiplier is below the policy's minimum, or outside what the lattice can carry."
    ),
    "batch": (
        "The batch does not exist, or is expected to hold fewer records than the policy's minimum."
    ),
    "shuffle": "The query is for a shuffler, and the policy names none.",
    "masks": "The query is for masked totals, and the policy has no table [masks].",
    "unpinned": "The query's cohort has a silo whose key the officer has not pinned.",
    "cohort": (
        "The query's cohort lacks this silo or its records, is too small, or holds a key that "
        "its silo has not signed for this run."
    ),
    "epoch": (
        "The query names a key of this silo that it no longer has; it gives a new one after "
        "each answer and each start."
    ),
    "attempts": "The round has been asked as often as the policy lets one round be asked.",
    "modulus": "The total of this cohort could pass the query's modulus.",
    "contributions": ("The query counts on more shares of noise than the policy allows for."),
    "round": (
        "The total that the answer would go into has been answered already, under another query id."
    ),
    "local": (
        "The answer would take what whoever sees the silo's own numbers can learn past the "
        "policy's maximum_local_epsilon."
    ),
    "steps": "The number of local steps, or their length, is outside the policy's range.",
    "shape": (
        "A point has not the model's number of parameters, or a feature statistic not the "
        "silo's number of features."
    ),
    "not-finite": "A point holds a number that is not finite.",
    "run-limit": "The run has asked as often as the policy lets one run ask.",
    "rate": "The gate has answered as often in the last hour as the policy lets it.",
    "budget": (
        "The answer, or the run that a hold is asked for, would take the data set past its "
        "privacy budget."
    ),
    "taken": (
        "What is left of the budget is held for other runs; a hold ends with its run, by its "
        "time or by the officer."
    ),
    "hold-limit": (
        "The asker would hold more of the budget, or for more runs at once, than the policy "
        "lets one asker hold."
    ),
    "lapsed": (
        "The hold of this id has ended, or its run has asked for another or ended since; a new "
        "one needs an id and a higher number."
    ),
    "id": "A name in the query is empty, too long or not printable.",
    "id-reused": "The query's id belongs to a query with other content.",
    "purged": (
        "The answer to this query id is older than the policy's keep_answers and was deleted: "
        "it is never computed again, and nothing is charged."
    ),
    "ledger": (
        "The ledger is missing, altered, behind its anchor or cannot be written; the operator "
        "must look at it."
    ),
    "internal": "The gate could not answer, for a reason that has to do with no record.",
}
"""Every code that a refusal can carry, and what it tells an operator."""
