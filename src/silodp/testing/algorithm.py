"""Check an algorithm.

Without noise it must solve the problem. With noise it must spend what its dry run priced.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, Renyi
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import FullBatch, Sampling
from silodp.server.algorithms import Algorithm, find
from silodp.server.federation import Everyone, Federation, Measured, Port
from silodp.server.output import output
from silodp.server.plan import Asked, Plan, calibrate, dry_run
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.evaluate import training_loss
from silodp.testing.federation import Recording
from silodp.testing.sentence import one_sentence
from silodp.wire.inprocess import InProcess

TOLERANCE = 1e-4
LARGE = 1e6
"""A clip that clips no record."""


def check_algorithm(
    algorithm: Algorithm | Callable[..., Iterator[Tensor]] | str,
    problem: Problem,
    records: Records,
    *,
    optimum: float,
    step: float,
    long: dict,
    short: dict,
    iterates: int,
    sampling: Sampling | None = None,
) -> None:
    """Check an algorithm of yours on a convex problem.

    Raise AssertionError with one sentence if something is wrong.

    - `algorithm` is the generator function itself, or FILE.py:NAME.
    - `optimum` is the least mean over silos of silo means of f0, plus f1, from an independent
      solver.
    - `long` are settings with which it must come within 1e-4 of `optimum`.
    - `short` are settings for everything else, with which it must yield `iterates` points.
    - `sampling` gives its batches with `short`.

    The check covers four things:

    1. It reaches the optimum.
    2. It asks through fed.mean, fed.measure, fed.cohort and fed.each only, and uses only the prox
       and the dimension of the problem.
    3. The ledger is charged, in order, what the dry run priced. This is at least 99.9 % of every
       silo's budget and never above.
    4. Runs that advance together equal the runs one at a time.
    """
    if isinstance(algorithm, str):
        name = algorithm
    else:
        name = getattr(algorithm, "name", "") or getattr(algorithm, "__name__", repr(algorithm))
    batches = sampling or FullBatch()
    with one_sentence(name):
        if isinstance(algorithm, Algorithm):
            tested = algorithm
        elif isinstance(algorithm, str):
            tested = find(algorithm)
        else:
            tested = Algorithm.of(algorithm, name)
        for which, settings in (("long", long), ("short", short)):
            _check_settings(tested, settings, which)
        check_narrow(
            tested, problem, records, settings=short, step=step, iterates=iterates, sampling=batches
        )
        check_optimum(tested, problem, records, optimum=optimum, settings=long, step=step)
        check_charges(tested, problem, records, settings=short, step=step, sampling=batches)
        check_runs_do_not_mix(tested, problem, records, settings=short, step=step, sampling=batches)


def _check_settings(algorithm: Algorithm, settings: dict, which: str) -> None:
    """Raise AssertionError unless the algorithm takes exactly these settings."""
    try:
        inspect.signature(algorithm.run).bind(
            None, None, None, **settings, step=None, **dict.fromkeys(algorithm.kinds)
        )
    except TypeError as error:
        wanted = ", ".join(algorithm.settings) or "none"
        raise AssertionError(
            f"{algorithm.name}: {which}={settings} does not fit ({error}); its settings "
            f"are {wanted}"
        ) from None


def check_optimum(
    algorithm: Algorithm,
    problem: Problem,
    records: Records,
    *,
    optimum: float,
    settings: dict,
    step: float,
) -> None:
    """Check that the last iterate has the optimal objective within 1e-4.

    There is no noise, every batch is full and nothing is clipped.
    """
    if "slope" in algorithm.settings:
        settings = settings | {"slope": math.inf}  # clips no difference
    plan = _plan(
        algorithm, settings, step, LARGE, FullBatch(), Budget(math.inf, 1e-6), records.counts
    )
    fed, _, _ = _connect(problem, records, plan, [0])
    w = output(_run(algorithm, settings, step, fed, problem, torch.zeros(1, problem.dim), plan))
    reached = float(training_loss(problem, w, records))
    apart = abs(reached - optimum)
    assert apart <= TOLERANCE, (
        f"{algorithm.name}: reached an objective of {reached:.6f}; the reference has "
        f"{optimum:.6f}, {apart:.2g} away"
    )


def check_narrow(
    algorithm: Algorithm,
    problem: Problem,
    records: Records,
    *,
    settings: dict,
    step: float,
    iterates: int,
    sampling: Sampling,
) -> None:
    """Check that the algorithm uses only what it may, and yields the promised number of points.

    Its port has `mean`, `measure`, `cohort` and `each`, and its problem `prox` and `dim`. It must
    ask the same as in a dry run, where every answer is zero.
    """
    plan = _unpriced(algorithm, 1.0, 0.5, sampling, records.counts)
    fed, _, _ = _connect(problem, records, plan, [0])
    asked: list[Query] = []
    start = torch.zeros(1, problem.dim)
    points = list(
        _run(
            algorithm,
            settings,
            step,
            _Narrow(algorithm.name, fed, asked),
            _ProxAlone(algorithm.name, problem),
            start,
            plan,
        )
    )
    assert len(points) == iterates, (
        f"{algorithm.name}: yielded {len(points)} iterates with {settings}, not {iterates}"
    )
    assert asked, f"{algorithm.name}: asked nothing"
    kinds = {query.mechanism.kind for query in asked}
    assert kinds <= set(algorithm.kinds), (
        f"{algorithm.name}: made releases of kinds {sorted(kinds)} but names only {algorithm.kinds}"
    )
    assert not bool(start.any()), f"{algorithm.name}: changed its starting point in place"
    dry = dry_run(
        partial(algorithm.run, **settings, step=step), plan.mechanisms, Everyone(len(records))
    )
    with_silos = zip(asked, [a.silos for a in dry] + [()] * len(asked), strict=False)
    _assert_as_priced(
        algorithm,
        plan,
        dry,
        [(query.mechanism.kind, *_facts(query.event(), silos)) for query, silos in with_silos],
    )


def check_charges(
    algorithm: Algorithm,
    problem: Problem,
    records: Records,
    *,
    settings: dict,
    step: float,
    sampling: Sampling,
    rule: str | None = None,
) -> None:
    """Check that the events of the dry run, of the queries and of the ledger are one list.

    At its end each silo's budget must be spent.
    """
    budgets = [Budget(0.8 + 0.7 * i, 1e-5 / (i + 1)) for i in range(len(records))]
    plan = _plan(algorithm, settings, step, 1.0, sampling, budgets, records.counts, rule)
    fed, channel, ledger = _connect(problem, records, plan, [0])
    for _ in _run(algorithm, settings, step, fed, problem, torch.zeros(1, problem.dim), plan):
        pass
    asked = [
        (query.mechanism.kind, *_facts(query.event(), silos)) for query, silos, _ in channel.log
    ]
    charged = [_facts(event, silos) for event, silos in ledger.log]
    _assert_as_priced(algorithm, plan, plan.asked, asked)
    assert [a[1:] for a in asked] == charged, (
        f"{algorithm.name}: the ledger was charged {len(charged)} events for {len(asked)} "
        "queries, or other ones"
    )
    spent = ledger.epsilon()[0]
    planned = np.broadcast_to(plan.spent(), (1, len(records)))[0]
    for i, budget in enumerate(budgets):
        where = f"{algorithm.name}: silo {i} spent {spent[i]:.6f} of epsilon = {budget.epsilon}"
        assert spent[i] <= budget.epsilon, f"{where}, which is too much"
        assert spent[i] >= budget.epsilon * 0.999, f"{where}, less than 99.9 %"
        assert math.isclose(spent[i], planned[i], rel_tol=1e-6), (
            f"{where} and the plan said {planned[i]:.6f}"
        )


def check_runs_do_not_mix(
    algorithm: Algorithm,
    problem: Problem,
    records: Records,
    *,
    settings: dict,
    step: float,
    sampling: Sampling,
) -> None:
    """Check that three runs give what each gives alone.

    Each has its own step, clip, slope, noise, start and seed.
    """
    seeds = [5, 6, 5]
    factor = torch.tensor([[1.0], [0.5], [0.25]])
    clips = 2.0 * factor.sqrt()
    steps = step * factor
    if "slope" in settings:
        slopes = {"slope": settings["slope"] * (1 + factor)}
    else:
        slopes = {}
    noise = factor.double() * torch.linspace(0.1, 0.3, len(records), dtype=torch.float64)
    start = torch.randn(3, problem.dim, generator=torch.Generator().manual_seed(1))
    plan = _unpriced(algorithm, clips, noise, sampling, records.counts)
    fed, _, _ = _connect(problem, records, plan, seeds)
    together = list(_run(algorithm, settings | slopes, steps, fed, problem, start, plan))
    for j, seed in enumerate(seeds):
        slope = {name: float(value[j]) for name, value in slopes.items()}
        plan = _unpriced(algorithm, float(clips[j]), noise[j : j + 1], sampling, records.counts)
        fed, _, _ = _connect(problem, records, plan, [seed])
        alone = list(
            _run(algorithm, settings | slope, float(steps[j]), fed, problem, start[j : j + 1], plan)
        )
        for t, (a, b) in enumerate(zip(together, alone, strict=True)):
            far = float((a[j] - b[0]).abs().max())
            limit = 1e-4 * (1 + float(b.abs().max()))
            assert far <= limit, (
                f"{algorithm.name}: run {j} of three differs from the run alone by "
                f"{far:.2g} at iterate {t}"
            )


# --- the other side of a run ---------------------------------------------------------------------


class _Narrow:
    """A federation with `mean`, `measure`, `cohort` and `each` and nothing else."""

    def __init__(self, name: str, fed: Port, asked: list[Query]) -> None:
        self._name = name
        self._fed = fed
        self._asked = asked

    def mean(self, query: Query) -> Tensor:
        """Record the query and return the federation's answer."""
        assert isinstance(query, Query), (
            f"{self._name}: asked {type(query).__name__}, which is not a Query"
        )
        self._asked.append(query)
        return self._fed.mean(query)

    def measure(self, query: Query) -> Measured:
        """Record the query and return the federation's answer."""
        self._asked.append(query)
        return self._fed.measure(query)

    def cohort(self) -> _Narrow:
        """Return a cohort with the same limits."""
        return _Narrow(self._name, self._fed.cohort(), self._asked)

    def each(self) -> dict[int, _Narrow]:
        """Return each silo with the same limits."""
        return {i: _Narrow(self._name, silo, self._asked) for i, silo in self._fed.each().items()}

    def __getattr__(self, attribute: str) -> None:
        """Raise AssertionError for everything else."""
        raise AssertionError(
            f"{self._name}: reached for fed.{attribute}; an algorithm may use fed.mean, "
            "fed.measure, fed.cohort and fed.each only"
        )


class _ProxAlone:
    """A problem of which an algorithm sees `prox` and `dim`."""

    def __init__(self, name: str, problem: Problem) -> None:
        self._name = name
        self.prox = problem.prox
        self.dim = problem.dim

    def __getattr__(self, attribute: str) -> None:
        """Raise AssertionError for everything else."""
        raise AssertionError(
            f"{self._name}: reached for problem.{attribute}; what depends on records is "
            "asked of the federation"
        )


class _Ledger(MemoryLedger):
    """A ledger that records the events that were charged."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.log: list[tuple[Event | TotalEvent, tuple[int, ...]]] = []

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        """Charge the event and record it."""
        super().charge(event, silos)
        self.log.append((event, tuple(silos)))


def _plan(
    algorithm: Algorithm,
    settings: dict,
    step: float,
    clip: float,
    sampling: Sampling,
    budgets: Budget | Sequence[Budget],
    counts: Sequence[int],
    rule: str | None = None,
) -> Plan:
    """Return a plan whose noise uses the budgets."""
    mechanisms = {kind: Gaussian(kind, clip, 0.0, sampling) for kind in algorithm.kinds}
    return calibrate(
        partial(algorithm.run, **settings, step=step), mechanisms, budgets, counts, rule=rule
    )


def _unpriced(
    algorithm: Algorithm, clip, noise_multiplier, sampling: Sampling, counts: Sequence[int]
) -> Plan:
    """Return a plan with any noise, against a budget without an end."""
    mechanisms = {
        kind: Gaussian(kind, clip, noise_multiplier, sampling) for kind in algorithm.kinds
    }
    return Plan(
        mechanisms, Renyi(2.0), [], tuple(counts), np.full((1, len(counts)), Budget(math.inf, 1e-6))
    )


def _connect(
    problem: Problem, records: Records, plan: Plan, seeds: Sequence[int]
) -> tuple[Federation, Recording, _Ledger]:
    """Return a federation in this process, its channel and its ledger."""
    ledger = _Ledger(plan.rule, plan.budgets.tolist(), records.counts)
    gate = Gate(
        Simulated(problem, records, seeds),
        ledger,
        dim=problem.dim,
        counts=records.counts,
        runs=len(seeds),
    )
    channel = Recording(InProcess(gate))
    return Federation(channel, Everyone(len(records))), channel, ledger


def _run(
    algorithm: Algorithm, settings: dict, step, fed, problem, w: Tensor, plan: Plan
) -> Iterator[Tensor]:
    """Yield the algorithm's points. Check each one before it is used."""
    for t, point in enumerate(
        algorithm.run(fed, problem, w, **settings, step=step, **plan.mechanisms)
    ):
        assert isinstance(point, Tensor), (
            f"{algorithm.name}: iterate {t} is {type(point).__name__}, not a tensor"
        )
        assert point.shape == w.shape, (
            f"{algorithm.name}: iterate {t} has shape {tuple(point.shape)}, not {tuple(w.shape)}"
        )
        yield point


def _assert_as_priced(
    algorithm: Algorithm, plan: Plan, dry: Sequence[Asked], asked: Sequence[tuple]
) -> None:
    """Raise AssertionError unless the queries are those of the dry run, at the plan's noise."""
    assert len(dry) == len(asked), (
        f"{algorithm.name}: asked {len(asked)} questions, the dry run {len(dry)}; ask the "
        "same whatever the answers are"
    )
    for t, (p, a) in enumerate(zip(dry, asked, strict=True)):
        priced = (
            p.kind,
            *_facts(
                Event(p.event.sampling, plan.mechanisms[p.kind].noise_multiplier, p.event.count),
                p.silos,
            ),
        )
        assert priced == a, f"{algorithm.name}: query {t} is {a} but the dry run priced {priced}"


def _facts(event: Event | TotalEvent, silos: Sequence[int]) -> tuple:
    """Return what decides an event's price, as one comparable value."""
    assert isinstance(event, Event)
    multiplier = np.asarray(event.noise_multiplier, dtype=np.float64)
    return event.sampling, event.count, multiplier.tolist(), tuple(silos)
