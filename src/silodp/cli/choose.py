"""Choosing before training: what `silodp plan --advise` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import dump, say, show, table
from silodp.cli.interrupted import interruptible
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up, shown
from silodp.core.problem.task import Task
from silodp.host import atomic
from silodp.host.schema import load_schema
from silodp.server.order import Order

KEPT = "what was finished is kept in {}, and the same command goes on from there"
WORDS = {
    "isrl": "nobody is trusted: what a silo sends is private already",
    "masks": "the other silos are trusted to add their noise, all but --colluding of them, and nobody is trusted with what a silo sends",
    "shuffle": "a shuffler is trusted: alone, or with the server, it sees more than this epsilon says, and no gate can verify it",
    "central": "the server is trusted with the records themselves: epsilon holds against readers of the model only",
}

Advise = Annotated[
    bool,
    typer.Option(
        "--advise", help="Say which model, algorithm, settings and trust to use, and what to expect, by simulation on made-up records."
    ),
]


# --- plan --advise ---------------------------------------------------------------------------------------------------------------


def facts_for(records: tuple[int, ...], features: int | None, classes: int, schema: Path | None) -> Any:
    """What `plan` knows of the silos, without their files: columns by the schema, else a mixture of kinds."""
    from silodp.lab.planning import named
    from silodp.server.advice import Facts, kinds_of

    if schema:
        task = load_schema(schema)
        return Facts(named(records), records, kinds_of(task, len(task.features)), task)
    if features is None:
        raise BadInput("features is missing; advice needs --features, the number of features of a record, or --schema")
    if features < 1 or classes < 0 or classes == 1:
        raise BadInput(
            f"there are {features} features and {classes} classes; give 1 feature or more, and 0 classes for a number, or 2 or more"
        )
    mixed = tuple(("number", "category", "boolean")[i % 3] for i in range(features))
    return Facts(named(records), records, mixed, Task.plain(classes))


def advise(order: Order, facts: Any, write: Path | None, *, as_json: bool) -> None:
    """Prints the advice, and writes the settings of the order's own trust; reads no record."""
    from silodp.server.advice.trusts import compared
    from silodp.server.advice.words import settings_file

    with interruptible("no record was read, and nothing is kept"):
        answer = compared(order, facts)
    if write:
        chosen = answer["trusts"][answer["advised"] or order.trust]["order"]
        atomic.write(write, settings_file(Order.read({"order": chosen}, write)), mode=0o644)
        answer["settings"] = str(write)
    dump(answer) if as_json else _show_advice(answer)


def _show_advice(answer: dict[str, Any]) -> None:
    entries = [e for e in answer["trusts"].values() if "refused" not in e]
    settings = ("model", "algorithm", "rounds", "clip", "step")
    columns = "|".join(
        ["trust!", *(k if k in ("model", "algorithm") else f"{k}>" for k in settings), "error>!", "no privacy>", "guessing>"]
    )
    rows = (
        (e["trust"], *(v if isinstance(v := e["order"][k], str) else f"{v:.3g}" for k in settings),
         f"{100 * e['expected']['error']:.1f} ± {100 * e['expected']['run_to_run']:.1f} %",
         *(f"{100 * e['expected'][k]:.1f} %" for k in ("not_private", "guessing")))
        for e in entries
    )  # fmt: skip
    show(table(columns, rows, title="What to expect, on made-up records"))
    for trust, entry in answer["trusts"].items():
        if "refused" in entry:
            say(f"Trust {trust} has no plan for this: {entry['refused']}.")
        elif not entry["expected"]["enough"]:
            say(f"Not enough records for this epsilon with trust {trust}: the model would be no better than guessing.", style="red")
        if needed := entry.get("needed"):
            few = f"{min(needed['records'])} to {max(needed['records'])}" if needed["records"] else ""
            ways = [f"about {few} records a silo at this epsilon"] * bool(few)
            ways += [f"about epsilon {needed['epsilon']:.2g} with the records that there are"] * bool(needed["epsilon"])
            say(
                f"  Enough would be {', or '.join(ways)}."
                if ways
                else "  Not even 1,000 times as many records, or epsilon 50, would be enough."
            )
    if trust := answer["advised"]:
        say(f"Advice: trust {trust} ({WORDS[trust]}).", *answer["trusts"][trust]["lines"])
    else:
        say("Advice: do not train on these records at this epsilon, whoever is trusted; privacy would be spent for nothing.")
    for silo in answer["gives_up"]:
        mu = f" (mu = {shown(silo['mu'])})" if "mu" in silo else ""
        say(
            f"A silo of {silo['records']} records gives up epsilon {silo['epsilon']:g}, delta {rounded_up(silo['delta'])}{mu}: "
            f"who knows all but one record and asks whether it is this one or another, finds at most {100 * silo['true_positives']:.1f} % "
            f"of those that are there at {100 * silo['false_positives']:g} % false alarms, and from a prior of 50 % is right at most "
            f"{100 * silo['guesses_right']:.1f} % of the time; his belief passes {100 * silo['belief']:.1f} % "
            f"with probability {silo['belief_passed']:.1g} at most."
        )
    if "settings" in answer:
        say(f"Settings: {answer['settings']}; `silodp train --settings` and `silodp federation run --settings` take them.")
