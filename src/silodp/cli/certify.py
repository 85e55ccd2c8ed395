"""`silodp certify`: exit code 1 if the claim is refuted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, progress, say, show, table
from silodp.core.errors import BadInput
from silodp.host.extension import load


def certify(
    release: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A function (x, y, seed) that returns all that is seen.", show_default=False)
    ],
    epsilon: Annotated[float, typer.Option(help="The epsilon that it claims.", show_default=False)],
    delta: Annotated[float, typer.Option(help="The delta that it claims.")] = 1e-5,
    unit: Annotated[str, typer.Option(help="What it claims to protect: record, or silo for all records of one client.")] = "record",
    runs: Annotated[int, typer.Option(help="Runs on each of two neighbouring tables, for each canary.")] = 1000,
    records: Annotated[int, typer.Option(help="Rows of the table.")] = 40,
    features: Annotated[int, typer.Option(help="Columns of the table.")] = 8,
    level: Annotated[float, typer.Option(help="Probability, at most, that a true claim is refuted.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seeds given to the function start here.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack somebody's DP code: an epsilon that is measured, next to the one that is claimed.

    The function gets a table, labels of 0 and 1 and a seed, trains as it always does, and returns what the adversary sees: weights, updates
    of all rounds, whatever is published. Rows have length 1 at most, canaries apart. Exit code 1 means that the claim is refuted.

    Example: `silodp certify mine.py:train --epsilon 3`
    """
    from silodp.lab.certify import LEAST_RUNS, UNITS
    from silodp.lab.certify import certify as measured

    if not 0 < epsilon < 100 or not 0 < delta < 1 or not 0 < level < 1:
        raise BadInput("epsilon must be between 0 and 100, delta and level between 0 and 1")
    if unit not in UNITS:
        raise BadInput(f"--unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    for name, value, least in (("runs", runs, LEAST_RUNS), ("records", records, 2), ("features", features, 2), ("seed", seed, 0)):
        if value < least:
            raise BadInput(f"--{name} is {value}; it must be {least} or more")
    function = load(release)
    if not callable(function):
        raise BadInput(f"{release} is no function; give FILE.py:NAME of one that takes (x, y, seed)")
    with progress("run", quiet=as_json) as tick:
        found = measured(
            function, epsilon, delta, unit=unit, runs=runs, records=records, features=features, level=level, seed=seed, tick=tick
        )
    broken = any(f.refuted for f in found)
    if as_json:
        dump({"claim": {"epsilon": epsilon, "delta": delta, "unit": unit}, "level": level, "findings": [asdict(f) for f in found], "refuted": broken})  # fmt: skip
    else:
        rows = [
            (f.canary, f"{f.empirical:.2f}", f"{f.lower:.2f}", f"{epsilon:g}", "REFUTED" if f.refuted else "not refuted") for f in found
        ]
        show(table("canary|measured>|at least>|claimed>|the claim is", rows, title=f"{release}, one {unit} replaced"))
        say(f"measured: the epsilon of the normal curve that fits, an estimate; at least: a bound, wrong with probability at most {level:g} over all rows.")  # fmt: skip
        say("The claim is refuted: it gives away more than it says." if broken else "The claim is not refuted by these attacks, which proves nothing more.")  # fmt: skip
    raise typer.Exit(1 if broken else 0)
