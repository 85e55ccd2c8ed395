"""What a run did not protect, in sentences for the person who signs. They follow SECURITY.md, "What
to know" and "Out of scope", as far as they apply.
"""

from __future__ import annotations

from silodp.core.problem.person import BY_ROW
from silodp.pages.runs import Run

ALWAYS = (
    (
        "The number of each silo's records is public. So are the names of silos, "
        "features and classes."
    ),
    (
        "What the model shows about people in general. A model that predicts well also "
        "predicts for people who gave no data."
    ),
    (
        "The model's quality. A malicious silo or server can make the model bad, and "
        "nothing here detects it."
    ),
    "A silo's own operator, and every other program on its machine, can see its records.",
)
SIMULATED = (
    (
        "This was a simulation: one process read the records of all silos. The "
        "guarantee covers what the silos would have sent to a server. It does not "
        "protect against the person who ran the simulation."
    ),
    (
        "Noise was pseudo-random floating-point noise. A deployed gate draws exact noise from "
        "the operating system's entropy."
    ),
    (
        "The spend covers only this run and its evaluations. Profiles and other runs "
        "on the same data add to it, including runs that choose settings."
    ),
)
DEPLOYED = (
    "Timing: the time that a silo takes to answer depends slightly on its records and its noise.",
    (
        "The server and the couriers know who asked, when, and whether a silo refused "
        "or did not answer."
    ),
    (
        "The spend on this page is the most that this run's training may have cost. "
        "Only each silo's own ledger has the sum over all runs, evaluations and "
        "profiles."
    ),
    ("Settings chosen from the results of other runs: those runs have their own price."),
)
COMPARED = (
    (
        "Settings were chosen by the training loss on the raw data, as in the paper. "
        "The budget was not charged for this choice."
    ),
    (
        "Features were standardised with statistics of the raw data. The budget was "
        "not charged for these statistics."
    ),
    "Test errors were measured on raw held-out records: research figures, not private.",
    (
        "Curves with the paper's noise spend more than their stated epsilon where the "
        "table shows it. Curves without privacy protect no record."
    ),
)


FIXED = (
    "The seed was fixed ({}). Anyone who knows it can compute the noise, and then no record is "
    "protected."
)
PEOPLE = (
    (
        "The guarantee is for the output of one silo. A person with records in several "
        "silos spends privacy in each, and can change a total over them once for each "
        "silo."
    ),
    ("A row without an id counts as a person. So does each spelling of an id."),
)
ROWS = (f"{BY_ROW} For a patient with k rows, the guarantee is that of k records together.",)


def sentences(run: Run) -> list[str]:
    """Return what the reader must not take for protected. The facts of this run come first."""
    if run.kind == "compare":
        return [*COMPARED, *SIMULATED[:2], *ROWS, *ALWAYS]
    if run.kind == "statistics":
        return _of_statistics(run)
    found: list[str] = []
    if run.about.get("seed") is not None and run.kind == "train":
        found.append(FIXED.format(run.about["seed"]))
    if run.summary.get("note"):
        found.append(str(run.summary["note"]))
    for name, words in (("test_error", "test error"), ("test_loss", "test loss")):
        if name in run.summary:
            found.append(
                f"The {words} was measured on raw test records: a research figure, not private."
            )
    if run.about.get("user_level"):
        found.append(
            "The budget was set for a whole silo's data. This page shows the resulting "
            "guarantee for one record."
        )
    if run.kind == "federation":
        found += DEPLOYED
    else:
        found += SIMULATED
    if run.of_persons:
        found += PEOPLE
    else:
        found += ROWS
    return [*found, *ALWAYS]


def _of_statistics(run: Run) -> list[str]:
    """Return the sentences about answers to `silodp stats`."""
    found = list(dict.fromkeys(str(line["answer"]["unit"]) for line in run.statistics))
    seeds = dict.fromkeys(line["answer"].get("seed") for line in run.statistics)
    found += [FIXED.format(seed) for seed in seeds if seed is not None]
    simulated = [line for line in run.statistics if "noise" in line["answer"]]
    if simulated:
        found += SIMULATED[:2]
    if len(simulated) < len(run.statistics):
        found += DEPLOYED[:2]
    return [
        *found,
        (
            "The spend covers the answers on this page. Trainings and other answers over the same "
            "records add to it. A silo's ledger has the sum."
        ),
        ALWAYS[0],
        ALWAYS[-1],
    ]
