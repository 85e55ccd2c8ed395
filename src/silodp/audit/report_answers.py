"""The rows of `silodp audit` over the deployed path: of every answer that a gate gives, the noise
and the coins measured against the price.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from scipy import stats

from silodp.audit import normal
from silodp.audit.answers import Answering, Row, answerable
from silodp.audit.pipeline import SOUND, Caught, Pipeline
from silodp.audit.probes_answers import ANSWERS, RATE, noise_of
from silodp.audit.probes_batches import BATCHES, COINS, check_coins, coins_of, drawn
from silodp.core.sampling import Poisson


def row_of(row: Row, silo: Answering, pipeline: Pipeline = SOUND) -> dict[str, Any]:
    """Noise over its price and coins over their rate, with 95 % intervals; an alarm with what it
    says, at a false-alarm rate of RATE in all.
    """
    z = noise_of(row, silo)
    made: dict[str, Any] = {
        "statistic": row.statistic.__name__,
        "mechanism": row.mechanism.__name__,
        "sampling": row.sampling.__name__,
        "noise": normal.interval(z, 0.05),
        "draws": z.size,
        "coins": None,
        "tossed": 0,
        "alarm": False,
        "says": "",
    }
    try:
        normal.look(z, str(row), RATE / len(answerable()))
        if row.sampling is Poisson:
            counts = drawn(row, pipeline)
            heads, tossed = coins_of(row, counts)
            interval = stats.binomtest(heads, tossed).proportion_ci(0.95)
            made |= {
                "coins": (heads / tossed / COINS, interval.low / COINS, interval.high / COINS),
                "tossed": tossed,
            }
            check_coins(row, counts, RATE / len(answerable()))
    except Caught as caught:
        made |= {"alarm": True, "says": str(caught)}
    return made


def answers(pipeline: Pipeline = SOUND) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row of each answer, and what the probes of records, prices, reach, lattice and batches say:
    nothing, if all is well.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        silos = {
            kind: Answering(Path(folder) / kind.__name__, pipeline, kind)
            for kind in dict.fromkeys(row.mechanism for row in answerable())
        }
        rows = [row_of(row, silos[row.mechanism], pipeline) for row in answerable()]
        for name, probe in (ANSWERS | BATCHES).items():
            if name in ("noise of every answer", "coins"):
                continue  # the rows
            (place := Path(folder) / name.replace(" ", "-")).mkdir()
            try:
                probe(pipeline, 0, place)
            except Caught as caught:
                found[name] = str(caught)
    return rows, found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    drawn_table = Table(
        title="What a deployed gate answers: noise and coins over what is paid for (95 %)"
    )
    for column in ("answer", "noise", "coins", "alarm"):
        drawn_table.add_column(
            column, justify="left" if column == "answer" else "right", overflow="fold"
        )
    for row in rows:
        shown = [
            f"{v[0]:.3f} ±{(v[2] - v[1]) / 2:.3f}" if v else ""
            for v in (row["noise"], row["coins"])
        ]
        name = ", ".join(row[part] for part in ("statistic", "mechanism", "sampling"))
        drawn_table.add_row(
            name, *shown, "YES" if row["alarm"] else "no", style="bold red" if row["alarm"] else ""
        )
    return drawn_table
