"""Check a way of connecting silos: it must give the numbers of the simulation and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad, GradDiff, LocalSteps
from silodp.server.federation import Answered, Channel, Everyone, Federation, Fixed, Port, Uniform
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import InProcess

Make = Callable[[Problem, Records, Everyone], Port]


def simulated_federation(problem: Problem, records: Records, participation: Everyone) -> Federation:
    """Return the reference: all silos in one process.

    It has an infinite budget, which only a simulation can have, so that noise may be off.
    """
    ledger = MemoryLedger(GDP(), Budget(np.inf, 1e-6), records.counts)
    gate = Gate(Simulated(problem, records, [0]), ledger, dim=problem.dim, counts=records.counts)
    return Federation(InProcess(gate), participation)


def check_federation(make: Make) -> None:
    """Check a backend of yours.

    Raise AssertionError with one sentence if something is wrong.

    The federation that `make(problem, records, participation)` connects must give the simulation's
    numbers. Its gates must answer without noise (a test-only gate; a shipped one cannot, see
    `check_replay`). The check covers four things:

    1. Means are equal for every kind of statistic.
    2. A mean weighs the answering silos alike, whatever their size.
    3. Each round asks the silos that the participation names.
    4. A cohort keeps its silos while the federation goes on to others.
    """
    random = np.random.default_rng(0)
    records = Records.of(
        [(random.normal(i, 1, (n, 3)), random.normal(size=n)) for i, n in enumerate((9, 14, 6, 11))]
    )
    problem = Problem(nn.Linear(3, 1), squared_error)
    everyone = Everyone(len(records))
    here, there = torch.randn(2, 1, problem.dim, generator=torch.Generator().manual_seed(0))
    silent = Gaussian("check", 0.8, 0.0)
    query = Query(Grad(here), silent)
    others = (
        Query(GradDiff(here, there), silent.clipped(0.3)),
        Query(LocalSteps(here, 3, 0.1), silent),
        Query(Grad(here), silent.clipped(0.0)),
        Query(Grad(there), silent.clipped(1e6)),
    )
    ours = make(problem, records, everyone)
    theirs = simulated_federation(problem, records, everyone)
    for each_query in (query, *others):
        got = ours.mean(each_query)
        wanted = theirs.mean(each_query)
        assert got.shape == wanted.shape == each_query.statistic.shape, (
            f"{_name(each_query)}: a mean has shape {tuple(got.shape)}"
        )
        _assert_close(got, wanted, f"{_name(each_query)}: differs from the reference")
    each = torch.stack(
        [
            simulated_federation(problem, records, Fixed((i,))).mean(query)
            for i in range(len(records))
        ]
    )
    for members in ((0,), (1, 2), tuple(range(len(records)))):
        wrong = (
            f"{_name(query)}: the mean over silos {members} is not that of their answers, each "
            "with weight 1/M"
        )
        _assert_close(
            make(problem, records, Fixed(members)).mean(query), each[list(members)].mean(0), wrong
        )
    draws = Uniform(len(records), 2, seed=3)
    fed = make(problem, records, Uniform(len(records), 2, seed=3))
    for turn in range(6):
        members = draws.draw()
        if turn % 2:
            port = fed.cohort()
            questions = 3
        else:
            port = fed
            questions = 1
        for again in range(questions):
            wrong = f"turn {turn}, question {again + 1}: the answer is not that of silos {members}"
            _assert_close(port.mean(query), each[list(members)].mean(0), wrong)


# --- replay --------------------------------------------------------------------------------------


class Recording:
    """A channel that records every query, its silos, and the release."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.log: list[tuple[Query, tuple[int, ...], Answered]] = []

    def ask(self, query: Query, silos: Sequence[int]) -> Answered:
        """Return the inner channel's release, and record it."""
        release = self._inner.ask(query, silos)
        self.log.append((query, tuple(silos), release))
        return release


class Replaying:
    """A channel without silos, which gives recorded releases again, in order.

    The queries and their silos must be the recorded ones.
    """

    def __init__(self, log: Sequence[tuple[Query, tuple[int, ...], Answered]]) -> None:
        self._left = list(log)

    def ask(self, query: Query, silos: Sequence[int]) -> Answered:
        """Return the next release. Raise AssertionError for another query or other silos."""
        assert self._left, f"{_name(query)}: one query more than was recorded"
        recorded, members, release = self._left.pop(0)
        assert tuple(silos) == members, (
            f"{_name(query)}: asked of silos {tuple(silos)}, recorded for {members}"
        )
        fields = _parts(query)
        recorded_fields = _parts(recorded)
        same = recorded_fields.keys() == fields.keys() and all(
            _equal(v, fields[k]) for k, v in recorded_fields.items()
        )
        assert same, f"{_name(query)}: not the recorded query {_name(recorded)}, bit for bit"
        return release

    def finish(self) -> None:
        """Raise AssertionError if recorded queries are left."""
        assert not self._left, f"{len(self._left)} recorded queries were not asked again"


def check_replay(
    run: Callable[..., Iterator[Tensor]],
    problem: Problem,
    w: Tensor,
    mechanisms: Mapping[str, Gaussian],
    channel: Channel,
    participation: Callable[[], Everyone],
) -> None:
    """Check that a run over `channel` depends on its releases only.

    Raise AssertionError if not. The channel has the shipped gate's noise. Its releases are recorded
    and replayed to the same generator in this process. The generator must ask the same queries and
    reach the same iterates, bit for bit: an algorithm has all its information from releases. No two
    releases in a row may be equal.
    """
    recording = Recording(channel)
    first = list(run(Federation(recording, participation()), problem, w, **mechanisms))
    replaying = Replaying(recording.log)
    second = list(run(Federation(replaying, participation()), problem, w, **mechanisms))
    replaying.finish()
    assert len(first) == len(second), f"{len(first)} iterates became {len(second)} in the replay"
    for t, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), f"iterate {t} differs in the replay by {(a - b).abs().max():.2g}"
    for (q, _, a), (_, _, b) in pairwise(recording.log):
        assert a.value.shape != b.value.shape or not torch.equal(a.value, b.value), (
            f"{_name(q)}: two releases in a row are equal"
        )


def _parts(query: Query) -> dict:
    """Return the fields of a query, by the name of its part."""
    return {
        f"{type(part).__name__}.{k}": v
        for part in (query.statistic, query.mechanism)
        for k, v in vars(part).items()
    }


def _equal(a: object, b: object) -> bool:
    """Return whether two fields are equal, bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    return a == b


def _name(query: Query) -> str:
    """Return a query's name in messages."""
    return f"{type(query.statistic).__name__} at clip {query.mechanism.clip}"


def _assert_close(got: Tensor, wanted: Tensor, message: str) -> None:
    """Raise AssertionError unless two means agree up to rounding."""
    far = (got - wanted).abs().max()
    assert far <= 1e-5 * (1 + wanted.abs().max()), f"{message}, by {far:.2g}"
