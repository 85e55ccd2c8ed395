"""Probes of every row of `answers`, at the door of a deployed silo: noise, records, price, reach
and batches.

The noise is from the operating system, so there is no seed to fix. Each statistical probe has a
false-alarm rate of RATE over all rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from silodp.audit import answers, normal
from silodp.audit.answers import Answering, N, Row, answerable, exact_sum
from silodp.audit.pipeline import Caught, Pipeline, Probes
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.silo.answer.exact import lattice_step
from silodp.silo.data.heldout import held_out
from silodp.silo.data.records import Records
from silodp.silo.ledger.chain import plain
from silodp.testing.statistic import hostile_records

ANSWERS = Probes("exact", "gate")
RATE = 1e-8
RELEASES = 8
DRAWS = 8000
"""The fewest draws of noise of each row. A row of few numbers has more releases."""
SURELY = 9.0
"""Tolerance in standard deviations. One of a million normals is farther out with probability 2e-13.
"""


def _silos(pipeline: Pipeline, folder: Path) -> Iterator[tuple[Row, Answering]]:
    """Yield every row, with a silo that answers it."""
    silos: dict[type, Answering] = {}
    for row in answerable():
        if row.mechanism not in silos:
            silos[row.mechanism] = Answering(
                folder / f"noise-{row.mechanism.__name__}", pipeline, row.mechanism
            )
        yield row, silos[row.mechanism]


# --- noise ---------------------------------------------------------------------------------------


def noise_of(row: Row, silo: Answering, releases: int = 0) -> np.ndarray:
    """Return the noise (releases, coordinates) of as many answers, the first at the door. It is
    standard normal if it is the noise of the price. Without `releases` there are DRAWS numbers.
    """
    query = row.query()
    at = answers.known(row)
    if not releases:
        releases = max(RELEASES, math.ceil(DRAWS / int(at.sum())))
    values = torch.stack(
        [silo.put(query)[at], *(silo.direct(query)[at] for _ in range(releases - 1))]
    ).numpy()
    return (values - answers.centre_of(row, query)[at].numpy()) / answers.std_of(query)


@ANSWERS.probe("noise of every answer")
def noise_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check the noise of every answer of a gate: it has the size of its price, it is Gaussian or
    binomial, and it is new in every coordinate and release.

    There are 8,000 draws of a row or more. Noise that is 10 per cent too small or too large is seen
    with probability 0.9999.
    """
    for row, silo in _silos(pipeline, folder):
        normal.look(noise_of(row, silo), str(row), RATE / len(answerable()))


@ANSWERS.probe("lattice of every answer")
def lattice_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check every single Gaussian answer: it is on the lattice that the query alone decides, and
    uses all of it.
    """
    for row, silo in _silos(pipeline, folder):
        if row.mechanism is not Gaussian or row.steps > 1:
            continue
        query = row.query()
        gamma = lattice_step(float(query.mechanism.clip), query.statistic.shape[-1])
        scale = answers.divisor(query)
        values = torch.stack([silo.direct(query) for _ in range(4)]).numpy()
        integers = np.rint(values * scale / gamma)
        if off := int((gamma * integers / scale != values).sum()):
            raise Caught(f"{row}: {off} released numbers are not on the public lattice")
        normal.low_bits(integers.astype(np.int64), str(row), RATE / len(answerable()))


@ANSWERS.probe("noise of small answers")
def noise_of_small_answers(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check the noise of answers with few coordinates, another clip and little noise: 32 answers of
    each row on records of zero, around their own mean.

    Half the noise is seen with probability 0.9999.
    """
    n = 6
    features = 8
    releases = 32
    problem = Problem(nn.Linear(features, 1, bias=False), logistic)
    held = held_out(n, 0.4)
    records = Records(
        torch.zeros(1, n, features, dtype=torch.float64),
        torch.zeros(1, n, dtype=torch.int64),
        (n,),
        ("silo",),
    )
    gate = pipeline.open_gate(problem, records, held_out_share=0.4)
    for row in answerable():
        query = row.query(features=features)
        m = query.mechanism.clipped(1.5 * query.mechanism.clip)
        batch = query.mechanism.sampling.batch(n)
        part = held if row.statistic.on_held_out else ~held
        m = replace(m, noise_multiplier=0.3)
        query = replace(query, mechanism=m)
        size = batch * int(part.sum()) / n
        std = 0.3 * 2 * float(m.clip) / size
        if row.steps > 1:
            std *= answers.STEP * math.sqrt(row.steps)
        values = [gate.answer(query, [0]).value[0, 0] for _ in range(releases)]
        z = np.stack([answers.mean_of(query, value, size).numpy() for value in values]) / std
        square = float(z.var(0, ddof=1).sum() * (releases - 1))
        freedom = (releases - 1) * z.shape[1]
        low, high = stats.chi2.isf(
            [1 - RATE / 2 / len(answerable()), RATE / 2 / len(answerable())], freedom
        )
        if not low < square < high:
            raise Caught(
                f"{row}: with {z.shape[1]} coordinates the noise has "
                f"{math.sqrt(square / freedom):.2f} times the size that is paid for"
            )


# --- records and price ---------------------------------------------------------------------------


def times(row: Row, query: Query, value: Tensor) -> np.ndarray:
    """Return how often each record (n,) is in an answer with almost no noise, by the coordinates of
    its own. It is -1 for a record that cannot be seen.

    Raise Caught if a part of a record is in the answer, or something else. Gentle records are not
    seen in local steps: their gradients change on the way.
    """
    total = exact_sum(row.statistic)
    sums = _as_sum(row, query, value, N, held_out(N, answers.HELD_OUT))
    blur = _blur(row, query, N)
    counted = np.full(N, -1)
    rest = sums.clone()
    for k in np.flatnonzero(answers.own_part(query)):
        at = answers.own_coordinates(int(k))
        vector = total[at]
        if row.steps > 1 and k % 4 == 3:
            rest[at] = 0.0
        elif float(vector.norm()) > 3 * SURELY * blur:
            counted[k] = round(float((sums[at] @ vector) / (vector @ vector)))
            rest[at] -= counted[k] * vector
    if float(rest.abs().max()) > SURELY * blur + 1e-3:
        raise Caught(
            f"{row}: {float(rest.abs().max()):.3g} of a clip is in the answer that no "
            "record of its part can have put there"
        )
    if counted.min() < -1 or counted.max() > row.steps:
        raise Caught(f"{row}: a record is in the answer {counted.max()} times")
    return counted


@ANSWERS.probe("records and price of every answer")
def records_and_price_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check every answer with almost no noise: each record of its part and batch is in it once,
    with the length of its clip, and nothing else. The charge is that of the question.

    Tolerances are 9 standard deviations.
    """
    partitions: list[tuple[Row, Query, Answering, np.ndarray]] = []
    for row, silo in _silos(pipeline, folder):
        query = row.query(loud=False)
        value = silo.put(query)
        _check_charge(row, query, silo)
        if query.statistic.rows(answers.world()[0], 0):
            answered = _as_sum(row, query, value, N, held_out(N, answers.HELD_OUT))
            difference = (answered - exact_sum(row.statistic)).abs().max()
            off = float(difference) / _blur(row, query, N)
            if off > SURELY:
                raise Caught(
                    f"{row}: the answer is not the mean over the records of its part, by "
                    f"{off:.3g} times its noise"
                )
            continue
        counts = times(row, query, value)
        visible = counts >= 0
        if row.sampling is FullBatch:
            if not (counts[visible] == row.steps).all():
                raise Caught(f"{row}: somebody is missing in a full batch")
        elif row.sampling is DisjointBatches:
            _check_partition(row, query, silo, counts)
            partitions.append((row, query, silo, counts))
        else:
            draws = [times(row, query, silo.direct(query))[visible] for _ in range(8)]
            if all((draw == draws[0]).all() for draw in draws):
                raise Caught(f"{row}: eight questions get the same batch")
    for silo in {silo.path: silo for _, _, silo, _ in partitions}.values():
        silo.restart()
    for row, query, silo, counts in partitions:
        if not (times(row, query, silo.put(query)) == counts).all():
            raise Caught(
                f"{row}: asked again, a batch has other records; a partition must never be "
                "drawn anew"
            )


def _check_partition(row: Row, query: Query, silo: Answering, counts: np.ndarray) -> None:
    """Raise Caught unless the batches of a name are a partition, always the same.

    `counts` are those of batch 1 of the name "run".
    """

    def batch(index: int, name: str = "run") -> np.ndarray:
        mechanism = replace(query.mechanism, sampling=DisjointBatches(3, index, name))
        of_batch = replace(query, mechanism=mechanism)
        return times(row, of_batch, silo.direct(of_batch))

    batches = np.stack([batch(i) for i in range(3)])
    visible = counts >= 0
    in_one = (batches[:, visible].sum(0) == row.steps).all()
    if not in_one or not np.isin(batches[:, visible], (0, row.steps)).all():
        raise Caught(f"{row}: a record is in two batches of a partition, or in none")
    if not (batches[1] == counts).all():
        raise Caught(
            f"{row}: asked again, a batch has other records; a partition must never be drawn again"
        )
    if all((batch(1, name) == counts).all() for name in ("second", "third")):
        raise Caught(f"{row}: partitions of other names are the same")


def _check_charge(row: Row, query: Query, silo: Answering) -> None:
    m = query.mechanism
    count = row.steps
    event: Event | TotalEvent
    if m.total:
        event = TotalEvent(m.sampling, m.noise_multiplier, count, answers.CROWD)
    else:
        event = Event(m.sampling, m.noise_multiplier, count)
    asked = plain(event)
    charged = silo.charged()
    if not asked.items() <= charged["event"].items():
        raise Caught(f"{row}: charged is {charged['event']}, but asked was {asked}")
    amount = float(silo.rule.price(event, np.asarray(N))[1])
    if charged["amount"] < amount * (1 - 1e-9):
        raise Caught(f"{row}: charged is {charged['amount']:.4g}, but the price is {amount:.4g}")


# --- reach ---------------------------------------------------------------------------------------


@ANSWERS.probe("reach of every answer")
def reach_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that no record, with any content, changes a sum by more than twice the clip, and that
    it changes no sum of another part.
    """
    n = 6
    features = 8
    problem = Problem(nn.Linear(features, 1, bias=False), logistic)
    held = held_out(n, 0.4)
    gates = {
        kind: [
            pipeline.open_gate(problem, r, held_out_share=0.4)
            for r in _variants(n, features, int(np.flatnonzero(part)[0]))
        ]
        for kind, part in ((True, held), (False, ~held))
    }
    for row, kind in itertools.product(answerable(), gates):
        if row.sampling is not FullBatch:
            continue
        query = row.query(loud=False, features=features)
        limit = float(kind == row.statistic.on_held_out)
        part = held if row.statistic.on_held_out else ~held
        size = query.mechanism.sampling.batch(n) * int(part.sum()) / n
        answered = [gate.answer(query, [0]).value[0, 0] for gate in gates[kind]]
        values = [answers.mean_of(query, value, size) for value in answered]
        sums = torch.stack([_as_sum(row, query, value, n, held) for value in values])
        clip = float(query.mechanism.clip)
        far = float(torch.cdist(sums, sums).max())
        if not far <= limit * row.steps * 2 * clip * 1.001 + SURELY * _blur(
            row, query, n
        ) * math.sqrt(2 * sums.shape[1]):
            raise Caught(
                f"{row}: one record moves the sum by {far / clip:.4g} clips; at most "
                f"{2 * limit * row.steps:g} are paid for"
            )


def _size_of_part(row: Row, for_testing: np.ndarray) -> int:
    """Return the number of records that the row's statistic is about."""
    if row.statistic.on_held_out:
        return int(for_testing.sum())
    return int((~for_testing).sum())


def _as_sum(row: Row, query: Query, value: Tensor, n: int, held: np.ndarray) -> Tensor:
    """Return the sum (d,) over the records of a batch that an answer of n records shows, with its
    noise. For local steps it is the sum over all steps.
    """
    batch = query.mechanism.sampling.batch(n)
    if row.steps > 1:
        mean = -value / answers.STEP - row.steps * answers.pull_of(query)
    else:
        mean = value
    return mean * (batch * int((held if row.statistic.on_held_out else ~held).sum()) / n)


def _blur(row: Row, query: Query, n: int) -> float:
    """Return the standard deviation of a coordinate of `_as_sum`."""
    m = query.mechanism
    return 2 * float(m.noise_multiplier) * float(m.clip) * math.sqrt(row.steps)


def _variants(n: int, features: int, at: int) -> Iterator[Records]:
    """Yield data sets that differ in the record at this place: from nothing to NaN, one way and the
    other, missing or there.
    """
    base = torch.randn(
        1, n, features, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    for (x, y), gone in itertools.product(hostile_records(features), (False, True)):
        rows = base.clone()
        labels = torch.arange(n)[None] % 2
        missing = torch.zeros(1, n, features, dtype=torch.bool)
        rows[0, at] = x
        labels[0, at] = y
        missing[0, at] = gone
        yield Records(rows, labels, (n,), ("silo",), missing)
