"""What a run did not protect, in sentences for whoever signs: SECURITY.md's "What to know" and "Out
of scope", as far as they apply.
"""

from __future__ import annotations

from silodp.core.problem.person import BY_ROW
from silodp.pages.runs import Run

ALWAYS = (
    (
        "The number of each silo's records is public, and so are the names of silos, features "
        "and classes."
    ),
    (
        "What can be learnt about people in general: a model that predicts well predicts also "
        "for those who gave no data."
    ),
    (
        "The model's quality: a silo or a server that wants a bad model gets one, and nothing "
        "here tells."
    ),
    "A silo's own operator, and whatever else runs on its machine, see its records.",
)
SIMULATED = (
    (
        "This was a simulation: one process held the records of all silos. What is promised "
        "holds for what silos would have said to a server, not against whoever ran it."
    ),
    (
        "Noise was pseudo-random floating-point noise. A deployed gate draws exact noise from "
        "the operating system's entropy."
    ),
    (
        "The spend was counted for this run and its evaluations alone: profiles and other runs "
        "on the same data, with other settings or to choose settings, add to it."
    ),
)
DEPLOYED = (
    "Timing: how long a silo takes to answer depends a little on its records and its noise.",
    (
        "Who asked, when, and that a silo refused or was silent, is known to the server and to "
        "whoever carries frames."
    ),
    (
        "The spend here is what this run's training may have cost at most. Each silo's own "
        "ledger has the sum over all runs, evaluations and profiles, and alone decides."
    ),
    (
        "Settings that were chosen by looking at the results of other runs: those runs had "
        "their own price."
    ),
)
COMPARED = (
    (
        "Settings were chosen by the training loss on the raw data, as in the paper; that is "
        "not charged to the budget."
    ),
    (
        "Features were standardised with statistics of the raw data; that is not charged to "
        "the budget."
    ),
    "Test errors were measured on raw held-out records: research figures, not private.",
    (
        "Curves with the paper's noise spend more than the epsilon at which they stand, where "
        "the table says so; curves that are not private protect nobody."
    ),
)


PEOPLE = (
    (
        "A person with records in several silos pays in each, and moves a total over them once "
        "for each: the guarantee is for what one silo says."
    ),
    (
        "Rows without an id count as people of their own, and so do people who are spelled in "
        "two ways."
    ),
)
ROWS = (f"{BY_ROW} With k rows the guarantee is that of k records together.",)


def sentences(run: Run) -> list[str]:
    """What the reader must not take for protected, the particular first."""
    said: list[str] = []
    if run.kind == "compare":
        return [*COMPARED, *SIMULATED[:2], *ROWS, *ALWAYS]
    if run.about.get("seed") is not None and run.kind == "train":
        said.append(
            f"The seed was fixed ({run.about['seed']}): whoever knows it knows the noise, "
            "and then nothing is protected."
        )
    if run.summary.get("note"):
        said.append(str(run.summary["note"]))
    for name, words in (("test_error", "test error"), ("test_loss", "test loss")):
        if name in run.summary:
            said.append(
                f"The {words} was measured on raw test records: a research figure, not private."
            )
    if run.about.get("user_level"):
        said.append(
            "Budgets were given for a whole silo's data; this page shows what that means "
            "for one record."
        )
    return [
        *said,
        *(DEPLOYED if run.kind == "federation" else SIMULATED),
        *(PEOPLE if run.of_persons else ROWS),
        *ALWAYS,
    ]
