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
        "The noise multiplier is below the policy's minimum, or outside the range of the lattice."
    ),
    "batch": (
        "The batch does not exist, or its expected number of records is below the policy's minimum."
    ),
    "shuffle": "The query is for a shuffler, and the policy names none.",
    "masks": "The query is for masked totals, and the policy has no table [masks].",
    "unpinned": "The query's cohort has a silo whose key the officer has not pinned.",
    "cohort": (
        "The query's cohort lacks this silo or its noise, is too small, or contains a "
        "key that its silo has not signed for this run."
    ),
    "epoch": (
        "The query names an old key of this silo. The silo makes a new key after each "
        "answer and each start."
    ),
    "attempts": "The round has reached the policy's limit of attempts.",
    "modulus": "The total of this cohort could pass the query's modulus.",
    "contributions": (
        "The query relies on the noise of more records than all members have by the policy."
    ),
    "round": ("The answer's total has already been answered, under another query id."),
    "local": (
        "With this answer, an observer of the silo's own counts could learn more than "
        "the policy's maximum_local_epsilon allows."
    ),
    "steps": "The number of local steps, or their length, is outside the policy's range.",
    "shape": (
        "A point does not have the model's number of parameters, or a feature "
        "statistic does not have the silo's number of features."
    ),
    "not-finite": "A point contains a number that is not finite.",
    "run-limit": "The run has reached the policy's limit of queries for one run.",
    "rate": "The gate has reached the policy's limit of answers for one hour.",
    "budget": (
        "The answer, or the run that asks for a reservation, would exceed the data "
        "set's privacy budget."
    ),
    "taken": (
        "The rest of the budget is reserved for other runs. A reservation ends with "
        "its run, after its time, or by the officer."
    ),
    "hold-limit": (
        "The asker would reserve more of the budget, or reserve for more runs at once, "
        "than the policy allows one asker."
    ),
    "lapsed": (
        "The reservation of this id has ended, or its run has made another one or has "
        "ended. A new reservation needs an id and a higher number."
    ),
    "id": "A name in the query is empty, too long or not printable.",
    "id-reused": "The query's id belongs to a query with other content.",
    "purged": (
        "The answer to this query id is older than the policy's keep_answers and was "
        "deleted. It is never computed again, and nothing is charged."
    ),
    "ledger": (
        "The ledger is missing, altered, behind its anchor or not writable. The "
        "operator must inspect it."
    ),
    "internal": "The gate could not answer, for a reason that does not depend on any record.",
}
"""Every code that a refusal can carry, and what it tells an operator."""
