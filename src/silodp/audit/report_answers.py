"""The rows of `silodp audit` about the deployed path: the noise and the coins of every answer of a
gate, measured against the price.
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
"""The limits of the audit, in words for its reader."""


def row_of(row: Row, silo: Answering, pipeline: Pipeline = SOUND) -> dict[str, Any]:
    """Return a row: the noise over its price and the coins over their rate, with 95 % intervals,
    and an alarm with its sentence.

    All rows together alarm falsely with probability RATE.
    """
    z = noise_of(row, silo)
    result: dict[str, Any] = {
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
            result |= {
                "coins": (heads / tossed / COINS, interval.low / COINS, interval.high / COINS),
                "tossed": tossed,
            }
            check_coins(row, counts, RATE / len(answerable()))
    except Caught as caught:
        result |= {"alarm": True, "says": str(caught)}
    return result


def answers(pipeline: Pipeline = SOUND) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each answer, and the sentences of the probes that found a mistake: probes of
    records, prices, reach, lattice, batches, grown files, restarts, layers and persons.
    """
    mistakes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        silos = {
            kind: Answering(Path(folder) / kind.__name__, pipeline, kind)
            for kind in dict.fromkeys(row.mechanism for row in answerable())
        }
        rows = [row_of(row, silos[row.mechanism], pipeline) for row in answerable()]
        for name, probe in (ANSWERS | BATCHES | PRICES).items():
            # The rows have the results of these two.
            if name in ("noise of every answer", "coins"):
                continue
            probe_folder = Path(folder) / name.replace(" ", "-")
            probe_folder.mkdir()
            try:
                probe(pipeline, 0, probe_folder)
            except Caught as caught:
                mistakes[name] = str(caught)
    return rows, mistakes


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    drawn_table = Table(
        title="What a deployed gate answers: noise and coins over what is paid for (95 %)"
    )
    drawn_table.add_column("answer", justify="left", overflow="fold")
    for column in ("noise", "coins", "alarm"):
        drawn_table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        cells = [", ".join(row[part] for part in ("statistic", "mechanism", "sampling"))]
        for interval in (row["noise"], row["coins"]):
            if interval:
                estimate, low, high = interval
                cells.append(f"{estimate:.3f} ±{(high - low) / 2:.3f}")
            else:
                cells.append("")
        if row["alarm"]:
            drawn_table.add_row(*cells, "YES", style="bold red")
        else:
            drawn_table.add_row(*cells, "no", style="")
    return drawn_table
