"""`silodp tune`: find settings for a private run, free on public or synthetic data, and at a price
on the silos' own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, LabelColumn, dump, progress, say, show, table
from silodp.cli.interrupted import KEPT, interruptible
from silodp.cli.options import takes_order
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up, shown
from silodp.server.order import Order


@takes_order(
    *(
        "rounds",
        "phase",
        "inner",
        "step",
        "clip",
        "feature_map",
        "user_level",
        "least",
        "sampling",
        "participation",
        "weights",
        "rule",
    ),
    *("noise", "from_theory", "lipschitz", "smoothness", "pl", "gap", "output"),
)
def tune(
    order: Order,
    silo: Annotated[
        list[Path] | None,
        typer.Option(help="The silos' own files, one each. Every use of them is charged."),
    ] = None,
    public: Annotated[
        list[Path] | None,
        typer.Option(help="Public files that resemble the silos', one each. Free."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A built-in data set that resembles the silos'. Free.")
    ] = None,
    records: Annotated[
        list[int] | None,
        typer.Option(help="Number of records in a silo, for synthetic data. Free."),
    ] = None,
    silos: Annotated[
        int | None, typer.Option(help="Number of silos, if all have the --records given once.")
    ] = None,
    features: Annotated[
        int | None, typer.Option(help="Features of a record, for synthetic data.")
    ] = None,
    signal: Annotated[
        str,
        typer.Option(
            help=(
                "Difficulty of the synthetic records: easy, typical, hard, or the "
                "accuracy of the best model, such as 0.9."
            )
        ),
    ] = "typical",
    label: LabelColumn = "label",
    classes: Annotated[
        str | None,
        typer.Option(help="Public list of classes, such as benign,malignant; 0,1 by default."),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(help="For --silo: number of settings to try, drawn from all combinations."),
    ] = 6,
    repetitions: Annotated[
        str | None,
        typer.Option(
            help=(
                "For --silo --trust central: poisson:MEAN, geometric:MEAN or "
                "tnb:ETA:GAMMA. Default poisson with mean --candidates."
            )
        ),
    ] = None,
    rounds: Annotated[
        list[int] | None, typer.Option(help="Rounds to try; may be repeated.")
    ] = None,
    phase: Annotated[
        list[int] | None,
        typer.Option(
            help="Phases to try: 1 is mb-sgd, more is spider. For an SVRG algorithm: inner steps."
        ),
    ] = None,
    step: Annotated[list[float] | None, typer.Option(help="Steps to try.")] = None,
    clip: Annotated[list[float] | None, typer.Option(help="Clips to try.")] = None,
    trials: Annotated[
        int, typer.Option(help="For free data: number of random splits, or of synthetic data sets.")
    ] = 3,
    scale: Annotated[
        str,
        typer.Option(
            help="For --silo: private (feature scaling learnt within the budget) or none."
        ),
    ] = "private",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run folder; by default runs/tune.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find settings for a private run. The search is free on public or synthetic data, and has an
    exact price on the silos' own. Training afterwards spends again.

    Without --algorithm it tries mb-sgd and spider. After an interrupt, the same command continues
    the search. With --silo every candidate is a private run, and so is its score. An untrusted
    server sees all candidates, so C candidates cost C runs: each gets 1/C of the budget (mu^2), and
    epsilon covers everything together. Random stopping (Papernot & Steinke 2022) does not help
    there, because it prices only the best run. It is for --trust central, where a curator keeps the
    other runs, their scores and their number secret.

    Examples: `silodp tune --records 1000 --silos 10 --features 20` · `silodp tune --data wbcd
    --model mlp:5` · `silodp tune --silo a.csv --silo b.csv --candidates 4` · `silodp tune --silo
    a.csv --silo b.csv --trust central --repetitions poisson:10`
    """
    from silodp.simulation import tune as lab

    given = {"rounds": rounds, "phases": phase, "steps": step, "clips": clip}
    ranges = lab.Ranges(**{name: tuple(values) for name, values in given.items() if values})
    names = ()
    if classes:
        names = tuple(classes.split(","))
    folder = out_dir or Path("runs") / "tune"
    if trials < 1:
        raise BadInput(f"trials is {trials}; it must be 1 or more")
    seed = order.seed
    order = replace(order, seed=None)
    with (
        interruptible(KEPT.format(folder)),
        progress("trying", quiet=as_json or order.trust == "central") as tick,
    ):
        if silo:
            if public or data or records:
                raise BadInput(
                    "--silo is charged, while --public, --data and --records are free; "
                    "give only one of them"
                )
            answer = _charged(
                order,
                silo,
                label,
                names,
                folder,
                ranges,
                seed,
                tick,
                candidates,
                repetitions,
                scale,
            )
        else:
            if repetitions or seed is not None:
                raise BadInput(
                    "--repetitions and --seed are only for --silo; leave them out, "
                    "because each of --trials has its own seed"
                )
            shape = None
            if records:
                shape = _shape(records, silos, features, len(names) or 2, signal)
            search = lab.FreeSearch(
                order, ranges, data, shape, tuple(map(str, public or ())), label, names, trials
            )
            answer = lab.search_freely(search, folder, tick=tick)
    if as_json:
        dump(answer)
    else:
        _show_tuning(answer)


def _shape(
    records: list[int], silos: int | None, features: int | None, classes: int, signal: str
) -> Any:
    from silodp.simulation.synthetic import Shape, signal_by_name

    if features is None:
        raise BadInput(
            "features is missing; give the number of features of a synthetic record with --features"
        )
    if silos is not None and (silos < 1 or len(records) > 1):
        raise BadInput(
            f"silos is {silos} with {len(records)} --records; give --silos, 1 or more, "
            "with --records once"
        )
    return Shape(tuple(records) * (silos or 1), features, classes, signal_by_name(signal))


def _charged(
    order: Order, silo, label, names, folder, ranges, seed, tick, candidates, repetitions, scale
) -> dict:
    from silodp.silo.data.files import load_silos
    from silodp.silo.data.records import Records
    from silodp.simulation.charged import ChargedSearch, search_charged

    if scale not in ("private", "none"):
        raise BadInput(f"scale {scale!r} is unknown; use private or none")
    if order.trust == "central" and repetitions is None:
        repetitions = f"poisson:{candidates}"
    loaded = load_silos(tuple(silo), label, classes=names or None)
    search = ChargedSearch(
        order,
        ranges,
        tuple(map(str, silo)),
        len(names) or 2,
        candidates,
        repetitions,
        scale == "private",
    )
    return search_charged(
        search, Records.of(loaded.records_raw, loaded.names), folder, seed=seed, tick=tick
    )


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}"


def _show_tuning(answer: dict) -> None:
    settings = ("algorithm", "rounds", "phase", "step", "clip", "slope")
    chosen = answer["chosen"]
    candidates = answer["candidates"]
    figure = "score"
    if answer["free"]:
        figure = "test_error"
    columns: list[str] = list(settings)
    if figure in candidates[0]:
        columns.append(figure)
    first, *others = columns
    headings = "|".join([first, *(f"{column.replace('_', ' ')}>" for column in others)])
    rows = []
    styles = []
    for row in candidates:
        rows.append([_cell(row.get(name, "")) for name in columns])
        style = None
        if all(row.get(name) == chosen.get(name) for name in settings):
            style = "bold"
        styles.append(style)
    show(table(headings, rows, title="Candidates", styles=styles))
    words = ", ".join(
        f"{name} {_cell(value)}" for name, value in chosen.items() if value is not None
    )
    say(f"Chosen: {words}.")
    if answer["free"]:
        say("No silo's record was read, so this cost no privacy.")
    else:
        for silo in answer["price"]:
            say(
                f"{silo['name']}: spent epsilon {shown(silo['spent_epsilon'])} of "
                f"{silo['epsilon']:g} "
                f"at delta {rounded_up(silo['delta'])}, in total."
            )
        if answer["trust"] == "isrl":
            say(
                "The server sees every candidate's run, so all runs are charged. "
                "Training with the chosen settings spends again."
            )
        else:
            say(
                "This is the price of the best of a secret number of runs "
                f"({answer['mean_runs']:.3g} on average), against an observer who sees "
                "nothing else. The other runs, their scores and their number were "
                "deleted. The curator has seen all records."
            )
    say(f"Settings: {answer['settings']}")
