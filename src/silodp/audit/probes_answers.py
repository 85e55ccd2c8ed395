"""What an examiner tries on every row of `answers`, at the door of a deployed silo: its noise, its
records, its price, its reach, its batches.

The noise is from the operating system, so there is no seed to fix: each statistical probe has a
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
SURELY = 9.0
"""Standard deviations: one of a million normals is farther out with probability 2e-13."""


def _silos(pipeline: Pipeline, folder: Path) -> Iterator[tuple[Row, Answering]]:
    """Every row, with a silo that answers it."""
    silos: dict[type, Answering] = {}
    for row in answerable():
        if row.mechanism not in silos:
            silos[row.mechanism] = Answering(
                folder / f"noise-{row.mechanism.__name__}", pipeline, row.mechanism
            )
        yield row, silos[row.mechanism]


# --- noise ---------------------------------------------------------------------------------------


def noise_of(row: Row, silo: Answering, releases: int = RELEASES) -> np.ndarray:
    """(releases, coordinates): the noise of as many answers, the first at the door; standard normal
    where it is what the price says.
    """
    query = row.query()
    at = answers.known(row)
    values = torch.stack(
        [silo.put(query)[at], *(silo.direct(query)[at] for _ in range(releases - 1))]
    ).numpy()
    return (values - answers.centre_of(row, query)[at].numpy()) / answers.std_of(query)


@ANSWERS.probe("noise of every answer")
def noise_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Of every answer that a gate gives: the noise is as large as its price says, of
    a total its share, and new in every coordinate and release.

    16,000 draws of a row (8,000 of a Score): 10 per cent too little or too much are seen with
    probability 0.9999.
    """
    for row, silo in _silos(pipeline, folder):
        normal.look(noise_of(row, silo), str(row), RATE / len(answerable()))


@ANSWERS.probe("lattice of every answer")
def lattice_of_every_answer(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Of every single Gaussian answer: it lies on the lattice that the query alone decides, and
    uses all of it.
    """
    for row, silo in _silos(pipeline, folder):
        if row.mechanism is not Gaussian or row.steps > 1:
            continue
        query = row.query()
        gamma = lattice_step(float(query.mechanism.clip), query.statistic.shape[-1])
        scale = answers.divisor(query)
        values = torch.stack([silo.direct(query) for _ in range(4)]).numpy()
        whole = np.rint(values * scale / gamma)
        if off := int((gamma * whole / scale != values).sum()):
            raise Caught(f"{row}: {off} released numbers are not on the public lattice")
        normal.low_bits(whole.astype(np.int64), str(row), RATE / len(answerable()))


@ANSWERS.probe("noise of small answers")
def noise_of_small_answers(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """The same of few coordinates, another clip and little noise: 32 answers of each row on records
    of zero, around their own mean.

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
    """(n,): how often each record is in an answer with next to no noise, by the coordinates of its
    own; -1 where that cannot be seen.

    Caught where somebody is in it in part, or somebody else is. Gentle records are not seen in
    local steps: their gradients change on the way.
    """
    total = exact_sum(row.statistic)
    sums = _as_sum(row, query, value, N, held_out(N, answers.HELD_OUT))
    blur = _blur(row, query, N)
    counted = np.full(N, -1)
    rest = sums.clone()
    for k in np.flatnonzero(answers.own_part(query)):
        at = answers.own_coordinates(int(k))
        own = total[answers.own_coordinates(int(k))]
        if row.steps > 1 and k % 4 == 3:
            rest[at] = 0.0
        elif float(own.norm()) > 3 * SURELY * blur:
            counted[k] = round(float((sums[at] @ own) / (own @ own)))
            rest[at] -= counted[k] * own
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
    """In every answer is each record of its part and batch once, as long as its clip, and nobody
    else; it is charged for what was asked.

    With next to no noise, where tolerances are 9 standard deviations.
    """
    partitions: list[tuple[Row, Query, Answering, np.ndarray]] = []
    for row, silo in _silos(pipeline, folder):
        query = row.query(loud=False)
        value = silo.put(query)
        _check_charge(row, query, silo)
        if query.statistic.rows(answers.world()[0], 0):
            off = float(
                (
                    _as_sum(row, query, value, N, held_out(N, answers.HELD_OUT))
                    - exact_sum(row.statistic)
                )
                .abs()
                .max()
            ) / _blur(row, query, N)
            if off > SURELY:
                raise Caught(
                    f"{row}: the answer is not the mean over the records of its part, by "
                    f"{off:.3g} times its noise"
                )
            continue
        seen = times(row, query, value)
        seen_are = seen >= 0
        if row.sampling is FullBatch:
            if not (seen[seen_are] == row.steps).all():
                raise Caught(f"{row}: somebody is missing in a full batch")
        elif row.sampling is DisjointBatches:
            _check_partition(row, query, silo, seen)
            partitions.append((row, query, silo, seen))
        else:
            draws = [times(row, query, silo.direct(query))[seen_are] for _ in range(8)]
            if all((draw == draws[0]).all() for draw in draws):
                raise Caught(f"{row}: eight questions get the same batch")
    for silo in {silo.path: silo for _, _, silo, _ in partitions}.values():
        silo.restart()
    for row, query, silo, seen in partitions:
        if not (times(row, query, silo.put(query)) == seen).all():
            raise Caught(
                f"{row}: asked again, a batch has other records; a partition must never be "
                "drawn anew"
            )


def _check_partition(row: Row, query: Query, silo: Answering, seen: np.ndarray) -> None:
    def batch(index: int, name: str = "run") -> np.ndarray:
        asked = replace(
            query, mechanism=replace(query.mechanism, sampling=DisjointBatches(3, index, name))
        )
        return times(row, asked, silo.direct(asked))

    batches = np.stack([batch(i) for i in range(3)])
    visible = seen >= 0
    if (
        not (batches[:, visible].sum(0) == row.steps).all()
        or not np.isin(batches[:, visible], (0, row.steps)).all()
    ):
        raise Caught(f"{row}: a record is in two batches of a partition, or in none")
    if not (batches[1] == seen).all():
        raise Caught(
            f"{row}: asked again, a batch has other records; a partition must never be drawn anew"
        )
    if all((batch(1, name) == seen).all() for name in ("second", "third")):
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
    """Whatever one record holds, it moves no sum by more than twice the clip; and it moves nothing
    that its part is not asked about.
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


def _as_sum(row: Row, query: Query, value: Tensor, n: int, held: np.ndarray) -> Tensor:
    """(d,): the sum over the records of a batch that an answer of n records tells, noise included;
    of local steps, over all of them.
    """
    batch = query.mechanism.sampling.batch(n)
    if row.steps > 1:
        mean = -value / answers.STEP - row.steps * answers.pull_of(query)
    else:
        mean = value
    return mean * (batch * int((held if row.statistic.on_held_out else ~held).sum()) / n)


def _blur(row: Row, query: Query, n: int) -> float:
    """The standard deviation of a coordinate of it."""
    m = query.mechanism
    return 2 * float(m.noise_multiplier) * float(m.clip) * math.sqrt(row.steps)


def _variants(n: int, features: int, at: int) -> Iterator[Records]:
    """Data sets that differ in the record at this place: from nothing to NaN, one way and the
    other, missing or there.
    """
    base = torch.randn(
        1, n, features, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    for (x, y), gone in itertools.product(hostile_records(features), (False, True)):
        features_of = base.clone()
        labels = torch.arange(n)[None] % 2
        missing = torch.zeros(1, n, features, dtype=torch.bool)
        features_of[0, at], labels[0, at], missing[0, at] = x, y, gone
        yield Records(features_of, labels, (n,), ("silo",), missing)
