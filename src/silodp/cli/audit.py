"""`silodp audit` and `silodp audit certify`. The exit code is 1 if a claim is refuted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import SETTINGS, Json, dump, progress, say, show, table
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Out, Settings, check_writable, typed
from silodp.core.errors import BadInput
from silodp.host.extension import load

audit = typer.Typer(add_completion=False, context_settings=SETTINGS, rich_markup_mode="markdown")


@audit.callback(invoke_without_command=True)
def audit_all(
    context: typer.Context,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="Attack only this algorithm, by name or FILE.py:NAME; may be repeated."),
    ] = None,
    settings: Settings = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Claimed epsilons to attack; 1 and 6 by default.")
    ] = None,
    runs: Annotated[
        int, typer.Option(help="Runs on each of the two neighbouring data sets.")
    ] = 20_000,
    one_run: Annotated[
        bool,
        typer.Option(
            "--one-run", help="Use many canaries among a silo's own records, and one run."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="For --one-run: a built-in data set. Its first silo is audited."),
    ] = None,
    silo: Annotated[
        Path | None,
        typer.Option(help="For --one-run: a CSV, Parquet or NPZ file with labels 0 and 1."),
    ] = None,
    label: Annotated[str, typer.Option(help="For --one-run: the label column.")] = "label",
    model: Annotated[str, typer.Option(help="For --one-run: logistic or mlp:HIDDEN.")] = "logistic",
    canaries: Annotated[int, typer.Option(help="For --one-run: the number of canaries.")] = 1000,
    rounds: Annotated[int, typer.Option(help="For --one-run: communication rounds R.")] = 25,
    seed: Annotated[int, typer.Option(help="First seed of the simulated runs.")] = 0,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """Attack the code that users run: measure how much an adversary learns about one record, and
    compare it with the claim. Exit code 1 means that a claim is refuted.

    Then query a deployed gate in every way that it allows, and compare noise, random draws, records
    and charges with the price. A refutation has confidence 1 - 1e-6 (1 - 1e-8 for the deployed
    answers, 1 - 1e-3 for --one-run).

    Examples: `silodp audit` · `silodp audit --algorithm mine.py:heavy_ball` · `silodp audit
    --one-run --data wbcd --epsilon 6`
    """
    if context.invoked_subcommand:
        if given := typed():
            named = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
            raise BadInput(
                f"{named} is before {context.invoked_subcommand}; write its options after it"
            )
        return
    from silodp.server.algorithms import assignments

    for name, value, least in (
        ("runs", runs, 100),
        ("canaries", canaries, 1),
        ("rounds", rounds, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise BadInput(f"{name} is {value}; it must be {least} or more")
    for value in epsilon or ():
        if not 0 < value < 100:
            raise BadInput(f"epsilon is {value:g}; it must be greater than 0 and below 100")
    given = assignments(settings or ())
    if one_run:
        _one_run(
            algorithm or ["mb-sgd"],
            given,
            epsilon or [6.0],
            data,
            silo,
            label,
            seed,
            rounds,
            as_json=as_json,
            model=model,
            canaries=canaries,
        )
    else:
        from silodp.simulation.runfolder import unused

        folder = unused(out_dir, Path("runs") / "audit", "audit.json")
        check_writable(folder)
        with interruptible("no results are stored, because the rows belong together"):
            _attacks(algorithm, given, tuple(epsilon or ()), runs, seed, folder, as_json=as_json)


def _attacks(
    algorithms: list[str] | None,
    given: dict[str, str],
    epsilons: tuple[float, ...],
    runs: int,
    seed: int,
    folder: Path,
    *,
    as_json: bool,
) -> None:
    from silodp.audit import report, report_answers
    from silodp.audit.claims import FACTOR

    with progress("attacks", quiet=as_json) as tick:
        rows = report.audit(
            algorithms, epsilons or report.CLAIMS, runs=runs, seed=seed, tick=tick, given=given
        )
    if algorithms:
        answers = []
        failed = {}
    else:
        answers, failed = report_answers.answers()
    report.write(rows, folder, answers)
    if as_json:
        flat = [{k: v for k, v in row.items() if k != "curve"} for row in rows]
        found = {"rows": flat, "answers": answers, "failed": failed, "folder": str(folder)}
        dump(found | {"cannot_see": list(report_answers.CANNOT_SEE)})
    else:
        show(report.table(rows))
        for gap in dict.fromkeys(row["gap"] for row in rows if row["gap"]):
            named = ", ".join(
                dict.fromkeys(report.special_of(row) for row in rows if row["gap"] == gap)
            )
            say(f"Always below the claim: {named}. Reason: {gap}.")
        for factor in (FACTOR, report.TOTAL_FACTOR):
            of_totals = factor == report.TOTAL_FACTOR
            weak = [
                f"{report.name_of(row)} at {row['claimed_epsilon']:g}"
                for row in rows
                if not row["sees"] and (row["gate"] in report.TOTALS) == of_totals
            ]
            if weak:
                say(
                    f"Too few runs to detect noise that fits only a claim {factor:g} times as "
                    f"large: {'; '.join(weak)}."
                )
        if answers:
            show(report_answers.table(answers))
        for alarm in [*(row["says"] for row in answers if row["alarm"]), *failed.values()]:
            say(f"ALARM: {alarm}", style="bold red")
        files = "audit.csv, curves.csv, audit.png, audit.svg"
        if answers:
            files += ", answers.csv"
        say(f"The results are in {folder}: {files}.")
        say("This audit cannot detect:")
        for limit in report_answers.CANNOT_SEE:
            say(f"- {limit}")
    _leave(any(row["alarm"] for row in [*rows, *answers]) or bool(failed))


def _one_run(
    algorithms: list[str],
    given: dict[str, str],
    epsilons: list[float],
    data: str | None,
    silo: Path | None,
    label: str,
    seed: int,
    rounds: int,
    *,
    as_json: bool,
    **order: Any,
) -> None:
    from silodp.audit import onerun
    from silodp.server.algorithms import find

    x, y, classes = onerun.own_records(data, silo, label)
    rows = []
    for name in algorithms:
        short = {
            "rounds": rounds,
            "phase": min(5, rounds),
            "local_steps": 2,
            "inner": min(5, rounds),
        }
        settings = find(name).schedule(short | given)
        rows += [
            onerun.one_run(onerun.OneRun(name, settings, e, **order), x, y, classes, seed=seed)
            for e in epsilons
        ]
    if as_json:
        dump({"rows": rows})
    else:
        cells = (
            (
                row["algorithm"],
                f"{row['claimed_epsilon']:g}",
                f"{row['empirical_epsilon']:.2f}",
                f"{row['correct']} of {row['guesses']}",
                row["alarm"],
            )
            for row in rows
        )
        title = f"One run with {order['canaries']} canaries among {len(y)} records"
        show(table("algorithm|claim|refuted at 95 %|right guesses|alarm", cells, title=title))
        say(
            "One run shows less than thousands of runs. Its bound is far below a "
            "correct claim, but above a badly broken one."
        )
    _leave(any(row["alarm"] for row in rows))


@audit.command()
def certify(
    release: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:NAME",
            help="A function (x, y, seed) that returns everything the adversary sees.",
            show_default=False,
        ),
    ],
    epsilon: Annotated[float, typer.Option(help="The claimed epsilon.", show_default=False)],
    delta: Annotated[float, typer.Option(help="The claimed delta.")] = 1e-5,
    unit: Annotated[
        str,
        typer.Option(
            help="The claimed unit of privacy: record, or silo for all records of one client."
        ),
    ] = "record",
    runs: Annotated[
        int, typer.Option(help="Runs on each of two neighbouring tables, for each canary.")
    ] = 1000,
    records: Annotated[int, typer.Option(help="Rows of the table.")] = 40,
    features: Annotated[int, typer.Option(help="Columns of the table.")] = 8,
    level: Annotated[
        float, typer.Option(help="Largest probability that a true claim is refuted.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="First seed given to the function.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack other DP code: measure an epsilon and compare it with the claim. Exit code 1 means
    that the claim is refuted.

    The function gets a table, labels of 0 and 1 and a seed. It trains as usual and returns what the
    adversary sees: weights, updates of all rounds, everything published. Rows have length at most
    1, except canaries.

    Example: `silodp audit certify mine.py:train --epsilon 3`
    """
    from silodp.audit.certify import LEAST_RUNS, UNITS
    from silodp.audit.certify import certify as measured

    if not 0 < epsilon < 100 or not 0 < delta < 1 or not 0 < level < 1:
        raise BadInput("epsilon must be between 0 and 100, delta and level between 0 and 1")
    if unit not in UNITS:
        raise BadInput(f"--unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    for name, value, least in (
        ("runs", runs, LEAST_RUNS),
        ("records", records, 2),
        ("features", features, 2),
        ("seed", seed, 0),
    ):
        if value < least:
            raise BadInput(f"--{name} is {value}; it must be {least} or more")
    function = load(release)
    if not callable(function):
        raise BadInput(
            f"{release} is not a function; give FILE.py:NAME of a function that takes (x, y, seed)"
        )
    with progress("run", quiet=as_json) as tick:
        found = measured(
            function,
            epsilon,
            delta,
            unit=unit,
            runs=runs,
            records=records,
            features=features,
            level=level,
            seed=seed,
            tick=tick,
        )
    broken = any(f.refuted for f in found)
    if as_json:
        dump(
            {
                "claim": {"epsilon": epsilon, "delta": delta, "unit": unit},
                "level": level,
                "findings": [asdict(f) for f in found],
                "refuted": broken,
            }
        )
    else:
        words = {True: "REFUTED", False: "not refuted"}
        rows = [
            (
                f.canary,
                f"{f.empirical:.2f}",
                f"{f.lower:.2f}",
                f"{epsilon:g}",
                words[f.refuted],
            )
            for f in found
        ]
        show(
            table(
                "canary|measured>|at least>|claimed>|the claim is",
                rows,
                title=f"{release}, one {unit} replaced",
            )
        )
        say(
            "measured: an estimate, the epsilon of the normal curve that fits. at least: a lower "
            f"bound, wrong with probability at most {level:g} over all rows."
        )
        if broken:
            say("The claim is refuted: the code reveals more than it claims.")
        else:
            say("These attacks do not refute the claim. They do not prove it either.")
    _leave(broken)


def _leave(alarm: bool) -> None:
    if alarm:
        raise typer.Exit(1)
