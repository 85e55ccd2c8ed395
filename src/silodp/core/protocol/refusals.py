"""List the fixed codes with which a gate refuses, each with a sentence for operators and askers."""

from __future__ import annotations

CODES: dict[str, str] = {
    "size": "The frame is longer than any query about this model can be.",
    "malformed": "The frame is not a query in the one form that this protocol has.",
    "version": "The frame has another version of the protocol.",
    "signature": "The frame is unsigned, or its signature does not belong to its key and content.",
    "asker": "The key that signed the query is not one that the policy lists.",
    "silo": "The query was signed for another silo than this one.",
    "expired": "The policy's last day is over.",
    "paused": "The silo's operator has paused the gate.",
    "model": "The query is about another model, loss or library version than the silo approved.",
    "statistic": "The policy does not allow this statistic.",
    "sampling": "The policy does not allow this way of drawing batches.",
    "rule": (
        "The ledger's rule has no price for such a release; the rule was fixed when the ledger was "
        "created."
    ),
    "clip": "The clip threshold is outside the policy's range.",
    "noise": (
        "The noise multiplier is below the policy's minimum, or outside the range of the lattice."
    ),
    "batch": ("The batch does not exist, or its expected size is below the policy's minimum."),
    "shuffle": "The query is for a shuffler, and the policy names none.",
    "masks": "The query is for masked totals, and the policy has no table [masks].",
    "unpinned": "The query's cohort has a silo whose key the officer has not pinned.",
    "cohort": (
        "The query's cohort lacks this silo or its records, is too small, or contains a key that "
        "its silo has not signed for this run."
    ),
    "epoch": (
        "The query names a key that this silo no longer has; the silo offers a new key after "
        "each answer and each start."
    ),
    "attempts": "The round has been asked as often as the policy allows for one round.",
    "modulus": "The total of this cohort could be larger than the query's modulus.",
    "contributions": ("The query counts on more shares of noise than the policy allows for."),
    "round": "The silo has already answered this round, under another query id.",
    "local": (
        "With the answer, the epsilon against a reader of the silo's own numbers would exceed the "
        "policy's maximum_local_epsilon."
    ),
    "steps": "The number of local steps, or their length, is outside the policy's range.",
    "shape": (
        "A point does not have the model's number of parameters, or a feature statistic does not "
        "have the silo's number of features."
    ),
    "not-finite": "A point contains a number that is not finite.",
    "run-limit": "The run has asked as often as the policy allows for one run.",
    "rate": "The gate has answered as often in the last hour as the policy allows.",
    "budget": "The answer, or the run of the hold, would exceed the data set's privacy budget.",
    "taken": (
        "The rest of the budget is reserved for other runs; a hold ends with its run, at its "
        "time or by the officer."
    ),
    "hold-limit": (
        "The asker would reserve more of the budget, or for more runs at once, than the policy "
        "allows one asker."
    ),
    "lapsed": (
        "The hold with this id has ended, or its run has since ended or asked for another hold; a "
        "new hold needs a new id and a higher number."
    ),
    "id": "A name in the query is empty, too long or not printable.",
    "id-reused": "The query's id belongs to a query with other content.",
    "purged": (
        "The answer to this query id is older than the policy's keep_answers and was deleted; "
        "it is never computed again, and nothing is charged."
    ),
    "ledger": (
        "The ledger is missing, altered, behind its anchor or not writable. The "
        "operator must inspect it."
    ),
    "internal": "The gate could not answer, for a reason that does not depend on any record.",
}
"""Every code of a refusal, and its meaning for an operator."""
