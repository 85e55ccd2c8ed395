"""`silodp audit`: exit code 1 if a claim is refuted, a mutant survives, or the pipeline as shipped fails a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, progress, say, show, table
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Settings
from silodp.core.errors import BadInput


def audit(
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Attack this algorithm only, by name or FILE.py:NAME; may be repeated.")
    ] = None,
    settings: Settings = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="Claims to attack; 1 and 6 by default.")] = None,
    runs: Annotated[int, typer.Option(help="Runs on each of the two neighbouring data sets.")] = 20_000,
    mutants: Annotated[bool, typer.Option("--mutants", help="Plant every known mistake and see whether it is caught.")] = False,
    one_run: Annotated[bool, typer.Option("--one-run", help="Many canaries among a silo's own records, and one run.")] = False,
    data: Annotated[str | None, typer.Option(help="For --one-run: a built-in data set, of which the first silo is audited.")] = None,
    silo: Annotated[Path | None, typer.Option(help="For --one-run: a CSV, Parquet or NPZ file with labels 0 and 1.")] = None,
    label: Annotated[str, typer.Option(help="For --one-run: column that holds the label.")] = "label",
    model: Annotated[str, typer.Option(help="For --one-run: logistic or mlp:HIDDEN.")] = "logistic",
    canaries: Annotated[int, typer.Option(help="For --one-run: how many canaries.")] = 1000,
    rounds: Annotated[int, typer.Option(help="For --one-run: communication rounds R.")] = 25,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="For --one-run: where MNIST or CIFAR-10 lie.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds of the simulated runs start here.")] = 0,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder; by default under runs/.")] = None,
    as_json: Json = False,
) -> None:
    """Attacks the code that users run: what an adversary really learns about one record, next to what is claimed.

    Then it asks a deployed gate everything that a gate answers, and measures noise, coins, records and charges against the price.
    An alarm (exit code 1) means that the claim is refuted at confidence 1 - 1e-6 (1 - 1e-8 for the deployed answers, 1 - 1e-3 for --one-run).

    Examples: `silodp audit` · `silodp audit --mutants` · `silodp audit --algorithm mine.py:heavy_ball` ·
    `silodp audit --one-run --data wbcd --epsilon 6`
    """
    from silodp.server.algorithms import assignments

    if mutants and one_run:
        raise BadInput("--mutants and --one-run are two audits; give one of them")
    for name, value, least in (("runs", runs, 100), ("canaries", canaries, 1), ("rounds", rounds, 1), ("seed", seed, 0)):
        if value < least:
            raise BadInput(f"{name} is {value}; it must be {least} or more")
    for value in epsilon or ():
        if not 0 < value < 100:
            raise BadInput(f"epsilon is {value:g}; it must be greater than 0 and below 100")
    given = assignments(settings or ())
    if mutants:
        _mutants(seed, as_json=as_json)
    elif one_run:
        _one_run(
            algorithm or ["mb-sgd"], given, epsilon or [6.0], data, silo, label, data_dir, seed, rounds,
            as_json=as_json, model=model, canaries=canaries,
        )  # fmt: skip
    else:
        from silodp.lab.runfolder import unused

        folder = unused(out_dir, Path("runs") / "audit", "audit.json")
        with interruptible("nothing is kept, since the rows belong together"):
            _attacks(algorithm, given, tuple(epsilon or ()), runs, seed, folder, as_json=as_json)


def _attacks(
    algorithms: list[str] | None, given: dict[str, str], epsilons: tuple[float, ...], runs: int, seed: int, folder: Path, *, as_json: bool
) -> None:
    from silodp.lab.audit import report, report_answers
    from silodp.lab.audit.claims import FACTOR

    with progress("attacks", quiet=as_json) as tick:
        rows = report.audit(algorithms, epsilons or report.CLAIMS, runs=runs, seed=seed, tick=tick, given=given)
    answers, failed = ([], {}) if algorithms else report_answers.answers()
    report.write(rows, folder, answers)
    if as_json:
        flat = [{k: v for k, v in row.items() if k != "curve"} for row in rows]
        dump({"rows": flat, "answers": answers, "failed": failed, "folder": str(folder)})
    else:
        show(report.table(rows))
        for gap in dict.fromkeys(row["gap"] for row in rows if row["gap"]):
            named = ", ".join(dict.fromkeys(report.special_of(row) for row in rows if row["gap"] == gap))
            say(f"Below the claim must stay {named}: {gap}.")
        if weak := [f"{report.name_of(row)} at {row['claimed_epsilon']:g}" for row in rows if not row["sees"]]:
            say(f"Too few runs to see it, were the noise that of a claim {FACTOR:g} times as large: {'; '.join(weak)}.")
        if answers:
            show(report_answers.table(answers))
        for says in [*(row["says"] for row in answers if row["alarm"]), *failed.values()]:
            say(f"ALARM: {says}", style="bold red")
        say(f"Everything is in {folder}: audit.csv, curves.csv, audit.png, audit.svg{', answers.csv' if answers else ''}.")
    _leave(any(row["alarm"] for row in [*rows, *answers]) or bool(failed))


def _mutants(seed: int, *, as_json: bool) -> None:
    try:
        from silodp.lab.audit.mutants import examine_all
    except ModuleNotFoundError:  # no wheel has them
        raise BadInput("the planted mistakes are in a checkout of the sources alone; run --mutants there") from None

    with progress("probes of the shipped pipeline, and mutants", quiet=as_json) as tick:
        rows, shipped = examine_all(seed, tick=tick)
    caught = sum(row["caught"] for row in rows)
    if as_json:
        dump({"rows": rows, "shipped": {"passes": not shipped, "caught_by": shipped}})
    else:
        cells = ((row["mutant"], "yes" if row["caught"] else "NO", row["caught_by"], row["says"]) for row in rows)
        show(table("mutant|caught|by|what the first probe says", cells, title=f"{caught} of {len(rows)} planted mistakes were caught"))
        say("The pipeline as shipped passes every probe." if not shipped else "The pipeline as shipped FAILS:")
        for probe, reason in shipped.items():
            say(f"  {probe}: {reason}")
    _leave(caught < len(rows) or bool(shipped))


def _one_run(
    algorithms: list[str], given: dict[str, str], epsilons: list[float], data: str | None, silo: Path | None, label: str,
    data_dir: Path | None, seed: int, rounds: int, *, as_json: bool, **order: Any,
) -> None:  # fmt: skip
    from silodp.lab.audit import onerun
    from silodp.server.algorithms import find

    x, y, classes = onerun.own_records(data, silo, label, data_dir)
    rows = []
    for name in algorithms:
        short = {"rounds": rounds, "phase": min(5, rounds), "local_steps": 2, "inner": min(5, rounds)}
        settings = find(name).schedule(short | given)
        rows += [onerun.one_run(onerun.OneRun(name, settings, e, **order), x, y, classes, seed=seed) for e in epsilons]
    if as_json:
        dump({"rows": rows})
    else:
        cells = (
            (row["algorithm"], f"{row['claimed_epsilon']:g}", f"{row['empirical_epsilon']:.2f}", f"{row['correct']} of {row['guesses']}", row["alarm"])
            for row in rows
        )  # fmt: skip
        title = f"One run with {order['canaries']} canaries among {len(y)} records"
        show(table("algorithm|claim|refuted at 95 %|right guesses|alarm", cells, title=title))
        say("One run shows less than thousands do: the bound is far below a sound claim, and above a badly broken one.")
    _leave(any(row["alarm"] for row in rows))


def _leave(alarm: bool) -> None:
    if alarm:
        raise typer.Exit(1)
