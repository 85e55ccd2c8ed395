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
from silodp.audit.probes_prices import PRICES
from silodp.core.sampling import Poisson

CANNOT_SEE = (
    "charges that are too high: an integral of real neighbours is a lower bound on a price",
    "the price of shuffled and masked totals in more than one coordinate",
    "prices of batches without replacement between the worst pair that the audit knows and the "
    "bound that is charged",
    "models other than one linear layer, and two linear layers with ReLU between them",
    "times other than the number of chunks that an answer computes, and whatever else a machine "
    "gives away",
    "a user's own model, loss, map of features or algorithm, unless --algorithm names it",
    "how a file is read, but for whose rows are whose: columns, codes, units and labels",
    "keys, certificates and the network: whether frames reach the gate, and from whom",
    "the choice of the best of several runs (`silodp tune`)",
    "mistakes that no probe is made for: an audit without an alarm is no proof",
)
"""What the audit cannot see, in words for its reader."""


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
    """A row of each answer, and what the probes of records, prices, reach, lattice, batches, grown
    files, restarts, layers and persons say: nothing, if all is well.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        silos = {
            kind: Answering(Path(folder) / kind.__name__, pipeline, kind)
            for kind in dict.fromkeys(row.mechanism for row in answerable())
        }
        rows = [row_of(row, silos[row.mechanism], pipeline) for row in answerable()]
        for name, probe in (ANSWERS | BATCHES | PRICES).items():
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
