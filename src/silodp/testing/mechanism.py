"""Check that a mechanism's noise, its price and the effect of one record belong together.

Everything is observed from outside, through an answerer's releases. Statistical checks have a
false-alarm rate of 1e-6 each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import GDP, Committed, Renyi
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad, GradDiff, LocalSteps, Statistic
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Answerer

Make = Callable[[Problem, Records, Sequence[int]], Answerer]
FALSE_ALARM = 1e-6
DIM = 10_000
LOCAL = 3
STEP = 0.5


def check_mechanism(
    mechanism: Gaussian,
    *,
    answerer: Make = Simulated,
    counts: Sequence[int] = (48, 30, 20),
    seed: int = 0,
) -> None:
    """Check that a mechanism of yours protects and prices as it claims.

    Raise AssertionError with one sentence if something is wrong.

    `mechanism` has a finite clip > 0 and a noise multiplier > 0, one for all or one per silo (1,
    N). `answerer(problem, records, seeds)` makes an answerer for len(seeds) runs. A noise
    multiplier of 0 must mean no noise there (a gate refuses it before its answerer). The check
    covers four things:

    1. One record moves an answer by at most `sensitivity`, and can move it that far.
    2. Noise has the standard deviation noise multiplier x sensitivity. It is Gaussian, and
       independent between silos, rounds and runs of different seeds.
    3. k releases cost k times as much as one.
    4. At another clip the noise is in proportion and the price the same.
    """
    _check_price(mechanism, counts)
    _check_reach(mechanism, answerer, counts, seed)
    _check_noise(mechanism, answerer, counts, seed)
    _check_proportion(mechanism, answerer, counts, seed)


def _check_price(mechanism: Gaussian, counts: Sequence[int]) -> None:
    """Check that k releases cost k times one, at any clip and by every rule that prices them."""
    one = mechanism.event()
    other = mechanism.clipped(mechanism.clip / 7).event()
    n = np.asarray(counts)
    rules: list[GDP | Renyi] = [Renyi(8.0)]
    if not mechanism.sampling.sampled:
        rules.append(GDP())
    for rule in rules:
        key, price = rule.price(one, n)
        assert np.all(price > 0), f"{mechanism}: a release is free by the {rule.name} rule"
        for k in (2, 5):
            many, cost = rule.price(mechanism.event(k), n)
            assert many == key, (
                f"{mechanism}: {k} releases are charged to {many!r} but one to {key!r}"
            )
            assert np.allclose(cost, k * price, rtol=1e-12), (
                f"{mechanism}: {k} releases cost {cost} by the {rule.name} rule, not {k} x {price}"
            )
        assert np.array_equal(rule.price(other, n)[1], price), (
            f"{mechanism}: the price changed with the clip by the {rule.name} rule"
        )
    _, share = Committed((mechanism.event(5),)).price(one, n)
    assert np.allclose(share, 1 / 5), (
        f"{mechanism}: one of five committed releases uses up {share} of them, not 1/5"
    )


def _check_reach(mechanism: Gaussian, answerer: Make, counts: Sequence[int], seed: int) -> None:
    """Check neighbours that pull a mean as far apart as clipping allows.

    Their distance must be at most the sensitivity, and reach it.
    """
    clip = float(mechanism.clip)
    silent = replace(mechanism, noise_multiplier=0.0)
    limits = [float(mechanism.sensitivity(n)) for n in counts]
    origin = torch.zeros(1, 4)
    across = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    gradients = [_pulling(counts, x=(1.0, 1.0, 1.0), y=sign * 1e6 * clip) for sign in (1, -1)]
    differences = [
        _pulling(counts, x=(sign * 1e4 * max(1.0, clip), 1.0, 0.0), y=0.0) for sign in (1, -1)
    ]
    cases: list[tuple[Statistic, list[Records], float]] = [
        (Grad(origin), gradients, 1.0),
        (LocalSteps(origin, 1, STEP), gradients, STEP),
        (GradDiff(across, origin), differences, 1.0),
    ]
    problem = Problem(nn.Linear(3, 1), squared_error)
    for statistic, (here, there), factor in cases:
        name = type(statistic).__name__
        farthest = [0.0] * len(counts)
        # The same seed draws the same batches, so only the replaced record differs.
        for trial in range(60):
            query = Query(statistic, _round(silent, trial))
            everyone = range(len(counts))
            both = [
                answerer(problem, records, [seed + trial]).answer(query, everyone)
                for records in (here, there)
            ]
            for i, distance in enumerate((both[0] - both[1]).norm(dim=-1)[0].tolist()):
                farthest[i] = max(farthest[i], distance / factor)
        for i, (far, limit) in enumerate(zip(farthest, limits, strict=True)):
            assert far <= limit * (1 + 1e-6), (
                f"{mechanism}: one record moved {name} of silo {i} by {far:.6g}, past the "
                f"sensitivity {limit:.6g}"
            )
            floor = limit * (1 - 1e-3) / (1 + CLIP_TOLERANCE)
            assert far >= floor, (
                f"{mechanism}: one record moved {name} of silo {i} by {far:.6g} at most; "
                f"the sensitivity is {limit:.6g}"
            )


def _check_noise(mechanism: Gaussian, answerer: Make, counts: Sequence[int], seed: int) -> None:
    """Check the noise on records without any gradient, where an answer is noise alone."""
    answerer_ = answerer(
        Problem(nn.Linear(DIM, 1, bias=False), squared_error), _blank(counts), [seed, seed + 1]
    )
    w = torch.zeros(2, DIM)
    cases: list[tuple[Statistic, float]] = [
        (Grad(w), 1.0),
        (GradDiff(w + 1, w), 1.0),
        (LocalSteps(w, LOCAL, STEP), STEP * LOCAL**0.5),  # each local step has independent noise
    ]
    vectors: dict[str, Tensor] = {}
    for (statistic, factor), r in product(cases, range(2)):
        value = answerer_.answer(
            Query(statistic, _round(mechanism, r)), range(len(counts))
        ).double()
        for j, (i, n) in product(range(2), enumerate(counts)):
            vectors[f"{type(statistic).__name__}, run {j}, silo {i}, round {r}"] = value[j, i] / (
                factor * _std(mechanism, i, n)
            )
    for name, z in vectors.items():
        _assert_standard_normal(z, f"{mechanism}: {name}")
    limit = stats.norm.isf(FALSE_ALARM / len(vectors) / (len(vectors) - 1)) / DIM**0.5
    matrix = torch.corrcoef(torch.stack(list(vectors.values()))).fill_diagonal_(0)
    a, b = divmod(int(matrix.abs().argmax()), len(vectors))
    names = list(vectors)
    r = float(matrix[a, b])
    assert abs(r) < limit, (
        f"{mechanism}: the noise of ({names[a]}) and of ({names[b]}) is not independent: "
        f"correlation {r:.3f}, not below {limit:.3f}"
    )


def _check_proportion(
    mechanism: Gaussian, answerer: Make, counts: Sequence[int], seed: int
) -> None:
    """Check that the noise of clipped(c) is in proportion to c, down to none at c = 0."""
    problem = Problem(nn.Linear(DIM, 1, bias=False), squared_error)
    records = _blank(counts)
    w = torch.zeros(1, DIM)
    for factor in (0.01, 3.0, 0.0):
        there = mechanism.clipped(mechanism.clip * factor)
        assert there.noise_multiplier is mechanism.noise_multiplier, (
            f"{mechanism}: clipped() changed the noise multiplier, and so the price"
        )
        assert there.sampling == mechanism.sampling, f"{mechanism}: clipped() changed the sampling"
        value = (
            answerer(problem, records, [seed])
            .answer(Query(Grad(w), there), range(len(counts)))
            .double()
        )
        if factor == 0:
            assert bool((value == 0).all()), (
                f"{mechanism}: at clip 0 the answer is not exactly zero"
            )
            continue
        for i, n in enumerate(counts):
            _assert_standard_normal(
                value[0, i] / (factor * _std(mechanism, i, n)),
                f"{mechanism}: at {factor} times the clip, silo {i}",
            )


def _std(mechanism: Gaussian, silo: int, n: int) -> Tensor:
    """Return noise multiplier x 2 clip / batch.

    It is computed here, so that the check finds a wrong `sensitivity`.
    """
    multiplier = torch.as_tensor(mechanism.noise_multiplier, dtype=torch.float64).reshape(1, -1)
    if multiplier.shape[1] == 1:  # one number for all silos
        silo = 0
    return multiplier[0, silo] * 2 * mechanism.clip / mechanism.sampling.batch(n)


def _assert_standard_normal(z: Tensor, what: str) -> None:
    """Raise AssertionError unless the numbers are standard normal."""
    total = float(z.square().sum())
    low, high = stats.chi2.interval(1 - FALSE_ALARM, len(z))
    ratio = (total / len(z)) ** 0.5
    assert low < total < high, (
        f"{what}: the noise has {ratio:.3f} times the standard deviation noise multiplier "
        "x sensitivity"
    )
    p = stats.kstest(z.numpy(), "norm").pvalue
    assert p > FALSE_ALARM, (
        f"{what}: the noise has the right size but is not Gaussian (Kolmogorov-Smirnov p = {p:.1g})"
    )


def _round(mechanism: Gaussian, r: int) -> Gaussian:
    """Return the mechanism of a round, within the batches of its partition."""
    return mechanism.at(r % getattr(mechanism.sampling, "batches", 1))


def _blank(counts: Sequence[int]) -> Records:
    """Return records whose gradients are zero."""
    return Records.of([(np.zeros((n, DIM), np.float32), np.zeros(n)) for n in counts])


def _pulling(counts: Sequence[int], *, x: tuple[float, float, float], y: float) -> Records:
    """Return silos in which record 0 pulls as hard as it can, over both tensors of the model.

    No other record pulls at all.
    """
    silos = []
    for n in counts:
        features = np.zeros((n, 3))
        targets = np.zeros(n)
        features[0] = x
        targets[0] = y
        silos.append((features, targets))
    return Records.of(silos)
