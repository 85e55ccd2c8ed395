"""Choosing before training: what `silodp plan --advise` prints, and `silodp tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, progress, say, show, table
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Settings
from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.server.order import Order

KEPT = "what was finished is kept in {}, and the same command goes on from there"
WORDS = {
    "isrl": "nobody is trusted: what a silo sends is private already",
    "shuffle": "a shuffler is trusted: alone, or with the server, it sees more than this epsilon says, and no gate can verify it",
    "central": "the server is trusted with the records themselves: epsilon holds against readers of the model only",
}

Features = Annotated[int | None, typer.Option(help="Features of a record, for synthetic data.")]
Signal = Annotated[
    str, typer.Option(help="How hard synthetic records are: easy, typical, hard, or what the best model gets right, such as 0.9.")
]
Advise = Annotated[
    bool,
    typer.Option(
        "--advise", help="Say which model, algorithm, settings and trust to use, and what to expect, by simulation on made-up records."
    ),
]


# --- plan --advise ---------------------------------------------------------------------------------------------------------------


def facts_for(records: tuple[int, ...], features: int | None, classes: int, schema: Path | None) -> Any:
    """What `plan` knows of the silos, without their files: columns by the schema, else a mixture of kinds."""
    from silodp.core.problem.task import Task
    from silodp.host.schema import load_schema
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
    from silodp.core.figures import shown
    from silodp.core.privacy.accounting import rounded_up

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


# --- tune ------------------------------------------------------------------------------------------------------------------------


def tune(
    silo: Annotated[list[Path] | None, typer.Option(help="The silos' own files, one each: every look is charged.")] = None,
    public: Annotated[list[Path] | None, typer.Option(help="Public files that resemble the silos', one each: free.")] = None,
    data: Annotated[str | None, typer.Option(help="A built-in data set that resembles the silos': free.")] = None,
    records: Annotated[list[int] | None, typer.Option(help="Records in a silo, for synthetic data: free.")] = None,
    silos: Annotated[int | None, typer.Option(help="Number of silos, if all have the --records given once.")] = None,
    features: Features = None,
    signal: Signal = "typical",
    label: Annotated[str, typer.Option(help="Column that holds the label.")] = "label",
    classes: Annotated[str | None, typer.Option(help="Public list of classes, such as benign,malignant; 0,1 by default.")] = None,
    model: Annotated[str, typer.Option(help="logistic or mlp:HIDDEN.")] = "logistic",
    epsilon: Annotated[float, typer.Option(help="Of every silo: of a run for free data, of everything together for --silo.")] = 3.0,
    delta: Annotated[float | None, typer.Option(help="1/n^2 of each silo by default.")] = None,
    trust: Annotated[
        str, typer.Option(help="For --silo: isrl (the server sees every run) or central (a curator holds all records).")
    ] = "isrl",
    candidates: Annotated[int, typer.Option(help="For --silo: how many settings are tried, drawn from all combinations.")] = 6,
    repetitions: Annotated[
        str | None,
        typer.Option(help="For --trust central: poisson:MEAN, geometric:MEAN or tnb:ETA:GAMMA; poisson of --candidates by default."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="The algorithm to tune, by name or FILE.py:NAME; mb-sgd and spider by default.")
    ] = None,
    settings: Settings = None,
    rounds: Annotated[list[int] | None, typer.Option(help="Rounds to try; may be repeated.")] = None,
    phase: Annotated[list[int] | None, typer.Option(help="Phases to try: 1 is mb-sgd, more is spider.")] = None,
    step: Annotated[list[float] | None, typer.Option(help="Steps to try.")] = None,
    clip: Annotated[list[float] | None, typer.Option(help="Clips to try.")] = None,
    slope: Annotated[float, typer.Option(help="Of spider's differences.")] = 1.0,
    trials: Annotated[int, typer.Option(help="For free data: random splits, or synthetic data sets.")] = 3,
    scale: Annotated[str, typer.Option(help="For --silo: private (feature scaling learnt within the budget) or none.")] = "private",
    seed: Annotated[int | None, typer.Option(help="Fixes all randomness: for research only, since known noise protects nobody.")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Where MNIST or CIFAR-10 lie.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder; by default runs/tune.")] = None,
    as_json: Json = False,
) -> None:
    """Settings for a private run: free on public or synthetic data, and with an honest price on the silos' own.

    With --silo every candidate is a private run, and so is its score. A server that nobody trusts sees all of them, chosen or not, so
    C candidates cost C runs: each gets 1/C of the budget (mu^2), and epsilon holds for everything together. Random stopping (Papernot &
    Steinke 2022) does not help there, since it prices the best run alone; it is for --trust central, where a curator keeps the others,
    their scores and their number secret. Training afterwards spends again. Interrupt it and run it again: it goes on where it stopped.

    Examples: `silodp tune --records 1000 --silos 10 --features 20` · `silodp tune --data wbcd --model mlp:5` ·
    `silodp tune --silo a.csv --silo b.csv --candidates 4` · `silodp tune --silo a.csv --silo b.csv --trust central --repetitions poisson:10`
    """
    from silodp.lab import tune as lab
    from silodp.server.algorithms import assignments
    from silodp.server.order import check_seed

    check_seed(seed)
    given = {"rounds": rounds, "phases": phase, "steps": step, "clips": clip}
    ranges = lab.Ranges(slope=slope, **{name: tuple(values) for name, values in given.items() if values})
    own = lab.own_algorithm(algorithm, assignments(settings or ()))
    names = tuple(classes.split(",")) if classes else ()
    folder = out_dir or Path("runs") / "tune"
    if trials < 1:
        raise BadInput(f"trials is {trials}; it must be 1 or more")
    with interruptible(KEPT.format(folder)), progress("trying", quiet=as_json or trust == "central") as tick:
        if silo:
            if public or data or records:
                raise BadInput("--silo is charged and --public, --data and --records are free; give one of them")
            answer = _charged(silo, label, names, folder, ranges, seed, tick, epsilon=epsilon, delta=delta, model=model, trust=trust,
                              candidates=candidates, repetitions=repetitions, scale=scale, own=own)  # fmt: skip
        else:
            if trust != "isrl" or repetitions or delta is not None:
                raise BadInput(
                    "--trust, --repetitions and --delta belong to --silo; free data cost nothing, and runs there use delta 1/n^2"
                )
            shape = _shape(records, silos, features, len(names) or 2, model, epsilon, signal) if records else None
            search = lab.FreeSearch(epsilon, model, ranges, data, shape, tuple(map(str, public or ())), label, names, trials, own)
            answer = lab.search_freely(search, folder, data_dir=data_dir, tick=tick)
    dump(answer) if as_json else _show_tuning(answer)


def _shape(records: list[int], silos: int | None, features: int | None, classes: int, model: str, epsilon: float, signal: str):
    from silodp.lab.synthetic import Shape, signal_by_name

    if features is None:
        raise BadInput("features is missing; synthetic data need --features, the number of features of a record")
    if silos is not None and (silos < 1 or len(records) > 1):
        raise BadInput(f"silos is {silos} with {len(records)} --records; give --silos, 1 or more, with --records once")
    return Shape(tuple(records) * (silos or 1), features, classes, model, epsilon, None, signal_by_name(signal))


def _charged(silo, label, names, folder, ranges, seed, tick, *, candidates, repetitions, scale, trust, **rest) -> dict:
    from silodp.core.privacy.tuning import repetitions_by_name
    from silodp.lab.charged import ChargedSearch, search_charged
    from silodp.silo.data.files import load_silos
    from silodp.silo.data.records import Records

    if scale not in ("private", "none"):
        raise BadInput(f"scale {scale!r} is unknown; use private or none")
    if trust == "central" and repetitions is None:
        repetitions = f"poisson:{candidates}"
    loaded = load_silos(tuple(silo), label, classes=names or None)
    search = ChargedSearch(
        silos=tuple(map(str, silo)), classes=len(names) or 2, ranges=ranges, candidates=candidates, repetitions=repetitions, trust=trust,
        scale=scale == "private", **rest,
    )  # fmt: skip
    law = repetitions_by_name(repetitions) if repetitions else None
    return search_charged(search, Records.of(loaded.records_raw, loaded.names), folder, law, seed=seed, tick=tick)


def _show_tuning(answer: dict) -> None:
    from silodp.core.figures import shown
    from silodp.core.privacy.accounting import rounded_up

    figure = "test_error" if answer["free"] else "score"
    columns = ("algorithm", "rounds", "phase", "step", "clip", "slope", *([figure] if figure in answer["candidates"][0] else []))
    headings = "|".join(column if column == "algorithm" else f"{column.replace('_', ' ')}>" for column in columns)
    chosen, candidates = answer["chosen"], answer["candidates"]
    rows = ([c if isinstance(c, str) else f"{c:.4g}" for c in (row.get(name, "") for name in columns)] for row in candidates)
    show(table(headings, rows, title="Candidates", styles=("bold" if _same(row, chosen) else None for row in candidates)))
    words = ", ".join(f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in chosen.items() if v is not None)
    say(f"Chosen: {words}.")
    if answer["free"]:
        say("No silo's record was read: this cost no privacy.")
    else:
        for silo in answer["price"]:
            say(
                f"{silo['name']}: spent epsilon {shown(silo['spent_epsilon'])} of {silo['epsilon']:g} "
                f"at delta {rounded_up(silo['delta'])}, in total."
            )
        if answer["trust"] == "isrl":
            say("The server sees every candidate's run, so all of them are paid for. Training with the chosen settings spends again.")
        else:
            say(
                f"Price of the best of a secret number of runs ({answer['mean_runs']:.3g} on average), for whoever sees nothing else. "
                "The other runs, their scores and their number were deleted; the curator has seen all records."
            )
    say(f"Settings: {answer['settings']}")


def _same(row: dict, chosen: dict) -> bool:
    return all(row.get(k) == chosen.get(k) for k in ("algorithm", "rounds", "phase", "step", "clip", "slope"))
