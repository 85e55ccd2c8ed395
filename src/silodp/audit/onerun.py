"""The one-run audit (Steinke, Nasr & Jagielski 2023): many canaries among a silo's own records, one
run, and as many guesses.

Each canary has a feature of its own, which no other record uses, and one of two opposite labels by
a fair coin. The attacker guesses the coins from the run's transcript. The audit needs one run of
the real pipeline instead of thousands, so a silo can afford it on its own data and model. Its bound
is looser in return, and never exceeds about log(guesses / 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.audit.bounds import one_run_epsilon
from silodp.audit.pipeline import SOUND, Pipeline
from silodp.audit.transcript import Case
from silodp.core.errors import BadInput
from silodp.core.problem.build import Words, build
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.query import Query
from silodp.engine.clipping import clipped_sum
from silodp.host.extension import load
from silodp.server.federation import Everyone, Federation
from silodp.silo.data.datasets import DATASETS
from silodp.silo.data.files import load_silos
from silodp.silo.data.records import Records
from silodp.testing.federation import Recording
from silodp.wire.inprocess import InProcess

LOUD = 20.0
"""A canary's value in its own feature. Its gradient is then longer than the clip for as long as its
prediction is wrong by 5 per cent or more.
"""

ALARM = 1e-3
"""False-alarm rate. A smaller rate is impossible, because the theorem adds 2 m delta times a few
thousandths to every probability.
"""


@dataclass(frozen=True)
class OneRun:
    """The audit of an algorithm with its settings on one silo's records, to which canaries are
    added.
    """

    algorithm: str
    settings: dict[str, Any]
    epsilon: float
    canaries: int = 1000
    guesses: int | None = None
    """Number of guesses, by default a quarter of the canaries: those with the highest scores. The
    number is fixed in advance, so the choice costs nothing.
    """
    model: str = "logistic"


def own_records(data: str | None, silo: Path | None, label: str) -> tuple[Tensor, Tensor, int]:
    """Return (x, y, classes) of the first silo of a built-in data set, or of a file whose labels
    are 0 and 1.

    Raise BadInput unless exactly one of them is given.
    """
    if bool(data) == bool(silo):
        raise BadInput("a one-run audit needs records: give either --data NAME or --silo FILE")
    if silo:
        x, y = load_silos([silo], label, classes=None).records_raw[0]
        return torch.as_tensor(np.asarray(x)).float(), torch.as_tensor(np.asarray(y)), 2
    if data not in DATASETS:
        raise BadInput(f"data set {data!r} is unknown; choose one of {', '.join(DATASETS)}")
    split = DATASETS[data].load(0, None)
    n = split.train.counts[0]
    return split.train.x[0, :n], split.train.y[0, :n], split.classes


def one_run(
    order: OneRun, x: Tensor, y: Tensor, classes: int, *, seed: int = 0, pipeline: Pipeline = SOUND
) -> dict[str, Any]:
    """Plant the canaries, run once, and guess. Return the epsilon that the guesses refute at 95 %
    confidence.

    Raise BadInput for an impossible number of guesses.
    """
    m = order.canaries
    guesses = order.guesses or max(1, order.canaries // 4)
    if not 1 <= guesses <= m:
        raise BadInput(
            f"{guesses} guesses about {m} canaries cannot be made; use between 1 and {m}"
        )
    coins = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, m))
    both, records = _planted(x.flatten(1), y, m, coins)
    problem = build(Words(order.model, Task.plain(classes)), both.x.shape[-1], load=load)
    case = Case(order.algorithm, order.epsilon, order.settings, step=0.5)
    plan = case.plan(records.counts, pipeline)
    gate, answerer = pipeline.simulated(problem, records, plan, [seed])
    channel = Recording(InProcess(gate))
    federation = Federation(channel, Everyone(1))
    for _ in case.run()(federation, problem, problem.initial([seed]), **plan.mechanisms):
        pass
    belief = _Belief(m)
    for query, _, release in channel.log:
        belief.update(problem, both, records, answerer, query, release.value[0, 0].double())
    scores = belief.coins()
    sure = scores.abs().topk(guesses).indices
    correct = int(((scores[sure] > 0) == (coins[sure] > 0)).sum())
    bound = one_run_epsilon(m, guesses, correct, case.delta, 0.05)
    return {
        "algorithm": order.algorithm,
        "claimed_epsilon": order.epsilon,
        "delta": case.delta,
        "empirical_epsilon": bound,
        "confidence": 0.95,
        "runs": 1,
        "records": len(y),
        "canaries": m,
        "guesses": guesses,
        "correct": correct,
        "model": order.model,
        "alarm": one_run_epsilon(m, guesses, correct, case.delta, ALARM) > order.epsilon,
    }


def _planted(x: Tensor, y: Tensor, m: int, coins: Tensor) -> tuple[Records, Records]:
    """Return the canaries and the silo. The first has each canary alone as a silo of two records,
    one per label. The second has the silo's own records with the canaries after them.
    """
    n, features = x.shape
    wide = torch.zeros(n + m, features + m)
    wide[:n, :features] = x
    wide[n:, features:] = LOUD * torch.eye(m)
    if not y.is_floating_point():
        low = 0.0
        high = 1.0
    else:
        low = -1e3
        high = 1e3
    labels = torch.cat([y, (low + (high - low) * coins).to(y.dtype)])
    pairs = wide[n:, None].expand(-1, 2, -1)
    both = Records(
        pairs,
        torch.tensor([low, high]).to(y.dtype).expand(m, 2),
        (2,) * m,
        tuple(map(str, range(m))),
    )
    return both, Records(wide[None], labels[None], (n + m,), ("silo",))


class _Belief:
    """The attacker's posterior of the coins, in a linear model: release = known part + sum of s_i
    (high_i - low_i) / 2 + Gaussian noise.

    The prior of each s_i, which is -1 or 1, is a standard normal. So canaries that share parameters
    (a bias, a second layer) are distinguished too.
    """

    def __init__(self, canaries: int) -> None:
        self._precision = torch.eye(canaries, dtype=torch.float64)
        self._evidence = torch.zeros(canaries, dtype=torch.float64)

    def coins(self) -> Tensor:
        """Return the posterior mean (m,) of each s_i."""
        return torch.linalg.solve(self._precision, self._evidence)

    def update(
        self,
        problem: Problem,
        both: Records,
        records: Records,
        answerer: Any,
        query: Query,
        value: Tensor,
    ) -> None:
        """Add one release to the posterior.

        The contributions of both labels, and of the silo's own records, are computed at the point
        of the query.
        """
        statistic = query.statistic
        mechanism = query.mechanism
        m = len(both)
        n = records.counts[0]
        clip = torch.as_tensor(mechanism.clip)
        batch = mechanism.sampling.batch(n)
        multiplier, sensitivity = (
            torch.as_tensor(v).double().flatten()[0]
            for v in (mechanism.noise_multiplier, mechanism.sensitivity(n))
        )
        std = float(multiplier * sensitivity)
        if not std > 0:
            return
        # The attacker has the partition of disjoint batches, and only the rate of sampled ones.
        member = torch.full((n,), batch / n)
        if not mechanism.sampling.sampled:
            member = answerer._weight(mechanism.sampling, [0]).flatten()
        without_canaries = torch.where(torch.arange(n) < n - m, member, 0.0)[None]
        reference = getattr(statistic, "reference", None)

        def answers(data: Records, weight: Tensor) -> Tensor:
            total = clipped_sum(
                problem, statistic.w, data.x, data.y, weight, clip, reference=reference
            )
            return total[0].double() / batch

        low, high = (answers(both, member[-m:, None] * label) for label in torch.eye(2)[:, None])
        middle = answers(records, without_canaries)[0] + (low + high).sum(0) / 2
        scale = 1.0
        pull = getattr(statistic, "pull", None)
        if pull is not None:
            # Local steps are treated as if every step were at the first step's point.
            scale = -float(statistic.step) * statistic.steps
            std = std * statistic.gain
            if isinstance(pull, Tensor):
                pull = pull[0].double()
            middle = middle + pull
        apart = scale * (high - low) / 2 / std
        self._precision += apart @ apart.T
        self._evidence += apart @ ((value - scale * middle) / std)
