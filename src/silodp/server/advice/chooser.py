"""The advisor: from public facts to a complete order, and what to expect of it.

Every candidate, the very algorithm of the run at the very noise of its plan, is run on synthetic
records of a few public worlds, many settings side by side. The candidate of the least regret is
chosen: the one that is seldom much worse than the best, whichever world the silos' records are
like. No record is read, so that the choice costs no privacy; it is the same on every call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.build import Load, Words, build
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.weights import Weights
from silodp.host.extension import load as from_file
from silodp.server.advice.candidates import (
    EFFORTS,
    MOMENTA,
    MOST_PRODUCTS,
    NETWORK,
    ONE_SHOT,
    WHOLE,
    Batch,
    Effort,
    Point,
    models_for,
    points_of,
    regrets,
    regrouped,
    rounded,
)
from silodp.server.advice.facts import Facts
from silodp.server.advice.pool import Pool, noise_of, pooled, shares_of
from silodp.server.advice.worlds import SQUARE, WORLDS, Sample, draw
from silodp.server.algorithms import ALGORITHMS, find
from silodp.server.order import Order, targets
from silodp.server.prepare import asked_at_least, least_of, prepare
from silodp.server.settings import participation_by_name

FINALISTS = 16
"""How many candidates are looked at again on fresh records."""


SMALL = 0.03
"""Share of what is learnt (of all silos' precision) below which a silo's budget is better kept."""
TOTALS = 1.1
"""Noise of a shuffler's totals over that of a curator's Gaussian: what their accountant and their
rounding cost.
"""


@dataclass(frozen=True)
class Advice:
    """The order, complete, and what to expect of it: of the error (or, for numbers, the loss as a
    share of that of a constant) a mean and the spread from run to run; the same without privacy,
    and that of guessing."""

    order: Order
    expected: dict[str, Any]
    silos: tuple[dict[str, Any], ...]
    tried: tuple[dict[str, Any], ...] = field(default=())
    left_out: tuple[str, ...] = ()
    """What was not tried, because a silo's policy does not allow what it asks for."""

    @property
    def enough(self) -> bool:
        """Whether the model is expected to be better than guessing."""
        return self.expected["enough"]

    def words(self) -> dict[str, Any]:
        """For run.json and --json."""
        return {
            "order": self.order.words(),
            "expected": self.expected,
            "silos": list(self.silos),
            "tried": list(self.tried),
        } | ({"left_out": list(self.left_out)} if self.left_out else {})


def choose(
    order: Order, facts: Facts, *, load: Load = from_file, effort: Effort | None = None
) -> Advice:
    """The order with everything decided that it leaves open; what it says stays as it is."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # small products are slower on several, and would round otherwise there
    try:
        return Search(order, facts, load, effort).advice()
    finally:
        torch.set_num_threads(torch_threads)


class Search:
    """One search; `sample` says on what records a candidate is tried, which `benchmarks.defaults`
    answers with others.
    """

    def __init__(self, order: Order, facts: Facts, load: Load, effort: Effort | None) -> None:
        weights = order.weights or _weights(order, facts)
        self.order = replace(order, weights=weights)
        self.facts = facts
        self.load = load
        self._problems: dict[str, Problem] = {}
        self._noise: dict[tuple[str, int], dict[str, float]] = {}
        self._samples: dict[tuple[int, int], Sample] = {}
        self.std = self._silos_std()
        if len(facts.counts) > 1:
            self.shares = shares_of(Weights(weights, facts.counts), self.std)
        else:
            self.shares = torch.ones(1, dtype=torch.float64)
        noise = float((self.shares * self.std).square().sum().sqrt())
        if order.trust != "isrl":
            whole = sum(facts.counts)
        else:
            whole = pooled(facts.counts, self.shares)
        if order.trust != "isrl":
            self.worth = sum(facts.counts) * float(
                (self.std * torch.tensor(facts.counts)).reciprocal().min()
            )
        else:
            self.worth = 1 / noise
        if order.totals:
            self.worth /= _of_totals(
                order,
                facts.counts,
                participation_by_name(order.participation, len(facts.counts), order.coins)(),
            )
        if order.model:
            self.models = [order.model]
        else:
            self.models = models_for(facts, self.worth)
        self.effort = effort or self._effort()
        self.records = min(whole, self.effort.pool * (2 if self.worth > NETWORK else 1))

    def advice(self) -> Advice:
        first = {}
        for batch in self.batches():
            for world in self.effort.worlds:
                errors = torch.stack(
                    [self.errors(batch, world, -1 - look) for look in range(self._looks(batch))]
                ).mean(0)
                for point, error in zip(
                    points_of(batch), errors.T.reshape(-1).tolist(), strict=True
                ):
                    first.setdefault(point, []).append(error)
        if self.order.output is None:
            outputs = ("last", "tail")
        elif self.order.output == "tail":
            outputs = ("tail",)
        else:
            outputs = ("last",)
        found = {
            point: np.array(errors) for point, errors in first.items() if point.output in outputs
        }
        regret = regrets(found)
        finalists = sorted(found, key=regret.__getitem__)[:FINALISTS]
        again: dict[Point, list[list[float]]] = {point: [] for point in finalists}
        for batch, points in regrouped(finalists):
            for world in self.effort.worlds:
                errors = np.stack(
                    [self.errors(batch, world, 1 + t).numpy() for t in range(self.effort.trials)]
                )
                for point, j in points:
                    again[point].append(errors[:, j, 1 if point.output == "tail" else 0].tolist())
        means = {point: np.array(rows).mean(1) for point, rows in again.items()}
        regret = regrets(means)
        winner = min(finalists, key=regret.__getitem__)
        return self._advised(
            winner,
            np.array(again[winner]),
            [self._told(p, means[p]) for p in sorted(finalists, key=regret.__getitem__)],
        )

    def _looks(self, batch: Batch) -> int:
        """Samples of a world at first: lines are quick, and of several models only the better ones
        of each go on.
        """
        return self.effort.looks * (2 if batch.model in ("linear", "logistic") else 1)

    def _effort(self) -> Effort:
        """By the size of the first model; and where models that bend are tried too, which take
        longer, noise is less and fewer samples will do.
        """
        first = self._problem(self.models[0])
        known = not is_file(self.models[0]) and first.known_loss and self.models[0] != "cnn"
        effort = next(
            effort for effort in EFFORTS if first.dim * (1 if known else 200) <= effort.parameters
        )
        if len(self.models) == 1:
            return effort
        networks = len(self.models) > 2
        return replace(
            effort,
            looks=1,
            trials=min(effort.trials, 2),
            worlds=effort.worlds[: 6 if networks else None],
        )

    # --- what is tried ---------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        order = self.order
        base = 0.5 * math.sqrt(1 + sum(SQUARE[kind] for kind in self.facts.kinds))
        if order.clip is not None:
            clips = [order.clip]
        else:
            clips = [rounded(base * share) for share in self.effort.clips]
        if order.momentum is not None:
            momenta = [order.momentum]
        else:
            momenta = MOMENTA
        found = []
        for model, rounds in [
            (m, r)
            for m in self.models
            for r in ([order.rounds] if order.rounds is not None else self._rounds(m))
        ]:
            first = (
                model == self.models[0]
            )  # of the others only what is near the best of a line: fewer settings
            points = [
                {
                    "clip": clip,
                    "step": rounded(length / clip) if order.step is None else order.step,
                    "momentum": momentum,
                }
                for clip, length, momentum in itertools.product(
                    clips if first else clips[-2:],
                    self.effort.lengths if order.step is None else (1.0,),
                    momenta if first else momenta[-1:],
                )
                if rounds > 1 or momentum == momenta[0]
            ]
            found.append(Batch(model, "momentum", rounds, tuple(points)))
        found = found if self.facts.allow("Grad") else []
        if self._one_shot_fits() and self.facts.allow("Gram"):
            if order.clip is not None:
                clips = [order.clip]
            else:
                clips = WHOLE
            found.append(
                Batch(
                    self.models[0],
                    ONE_SHOT,
                    1,
                    tuple({"clip": c, "step": 1.0, "momentum": 0.0} for c in clips),
                )
            )
        if not found:
            raise BadInput(
                "nothing that could be chosen asks only for what every silo's policy "
                f"allows ({', '.join(self.facts.statistics or ())}); "
                "name an --algorithm, or have a silo allow Grad"
            )
        return found

    def _one_shot_fits(self) -> bool:
        order = self.order
        task = self.facts.plain
        linear = self.models[0] in ("linear", "logistic") and task.kind in (
            "binary",
            "multiclass",
            "regression",
        )
        said = (
            any(getattr(order, name) is not None for name in ("rounds", "step", "momentum"))
            or order.loss
            or order.prox != "zero"
        )
        few = len(self.facts.kinds) <= MOST_PRODUCTS
        return (
            ONE_SHOT in ALGORITHMS and linear and not said and few and not order.totals
        )  # which are of gradients alone

    def _rounds(self, model: str) -> tuple[int, ...]:
        if model.startswith("mlp"):
            if self.effort.rounds[-1] < 50:
                return self.effort.rounds[-2:]
            return (50, 100)
        if model == self.models[0]:
            return self.effort.rounds
        return self.effort.rounds[-3:]

    # --- trying it -------------------------------------------------------------------------------

    def errors(
        self, batch: Batch, world: int, trial: int, noise: Mapping[str, float] | None = None
    ) -> Tensor:
        """(J, 2): the error of each point's last iterate, and of the average of the later half."""
        problem = self._problem(batch.model)
        sample = self.sample(world, trial)
        algorithm = find(batch.algorithm)
        columns = {
            name: torch.tensor([[p[name]] for p in batch.points]) for name in batch.points[0]
        }
        clip = columns.pop("clip")
        columns = {
            name: column
            for name, column in columns.items()
            if name == "step" or name in algorithm.settings
        }
        settings = algorithm.schedule(self._settled(batch).schedule)
        mechanisms = {kind: Gaussian(kind, clip, 0.0) for kind in algorithm.kinds}
        fed = Pool(problem, sample, self._noise_of(batch) if noise is None else noise, trial)
        start = problem.initial([trial]).expand(len(batch.points), -1).contiguous()
        tail = torch.zeros_like(start)
        kept = 0
        last = start
        for r, last in enumerate(
            algorithm.run(fed, problem, start, **{**settings, **columns}, **mechanisms)
        ):
            if r >= batch.rounds // 2:
                tail = tail + last
                kept = kept + 1
        return torch.stack([_error(problem, w, sample) for w in (last, tail / max(kept, 1))], 1)

    def _settled(self, batch: Batch) -> Order:
        """For the plan: noise depends on neither clip nor step."""
        if self.order.totals:
            order = self.order.under("central")
        else:
            order = self.order
        return replace(
            order,
            algorithm=batch.algorithm,
            model=batch.model,
            rounds=batch.rounds,
            clip=1.0,
            step=1.0,
            momentum=0.5,
            output="last",
        )

    def _noise_of(self, batch: Batch) -> dict[str, float]:
        key = batch.algorithm, batch.rounds
        if key not in self._noise:
            facts = self.facts
            order = self._settled(batch)
            made = prepare(
                order, facts.names, facts.counts, budgets=facts.budgets, scaled=facts.scaled
            )
            who = made.participation()
            factor = _fewer(who) * (
                _of_totals(self.order, facts.counts, who) if self.order.totals else 1.0
            )
            self._noise[key] = {
                kind: factor * std
                for kind, std in noise_of(made, Weights(order.weights, facts.counts)).items()
            }
        return self._noise[key]

    def _silos_std(self) -> Tensor:
        """(N,): up to a factor, the std of the noise that each silo's own mean would have."""
        from silodp.core.privacy.accounting import gdp_mu

        budgets = self.facts.budgets or targets(self.order, self.facts.names, self.facts.counts)
        return torch.tensor(
            [1 / (n * gdp_mu(b)) for n, b in zip(self.facts.counts, budgets, strict=True)],
            dtype=torch.float64,
        )

    def _problem(self, model: str) -> Problem:
        if model not in self._problems:
            words = Words(model, self.facts.task, self.order.prox, self.order.loss)
            self._problems[model] = build(
                words, len(self.facts.kinds), load=self.load
            ).by_row  # made-up records are rows
        return self._problems[model]

    def sample(self, world: int, trial: int) -> Sample:
        if (world, trial) not in self._samples:
            seed = 100 * world + 50 + trial
            self._samples[world, trial] = draw(
                WORLDS[world],
                self.facts.kinds,
                self.facts.plain,
                self.records,
                self.effort.tested,
                seed,
            )
        return self._samples[world, trial]

    # --- what is said of it ----------------------------------------------------------------------

    def _advised(self, winner: Point, errors: np.ndarray, tried: list[dict[str, Any]]) -> Advice:
        """`errors` (worlds, trials) of the winner."""
        open_errors = self._without_noise(winner)
        guess = np.array([_guessing(self.sample(world, 1)) for world in self.effort.worlds])
        mean = float(errors.mean())
        spread = float(errors.std(1, ddof=min(1, errors.shape[1] - 1)).mean())
        gain = float(guess.mean()) - mean
        most = float((guess - open_errors).mean())
        expected = {
            "measure": "error" if _counted(self.facts.plain) else "loss",
            "weighed": bool(self.facts.plain.weights),
            "error": mean,
            "run_to_run": spread,
            "middle": [float(q) for q in np.quantile(errors, [0.25, 0.75])],
            "not_private": float(open_errors.mean()),
            "guessing": float(guess.mean()),
            "enough": gain > max(spread, 0.2 * most),
            "worlds": [
                {"error": float(e), "not_private": float(o), "guessing": float(g)}
                for e, o, g in zip(errors.mean(1), open_errors, guess, strict=True)
            ],
        }
        left_out = [
            name
            for name, statistic, fits in (
                ("gradient descent", "Grad", True),
                (ONE_SHOT, "Gram", self._one_shot_fits()),
            )
            if fits and not self.facts.allow(statistic)
        ]
        return Advice(
            self._resolved(winner),
            expected,
            tuple(self._silo_words()),
            tuple(tried),
            tuple(left_out),
        )

    def _without_noise(self, winner: Point) -> np.ndarray:
        """(worlds,): the error of the winner's model at the best of a few steps, without noise."""
        settings = tuple(
            {"clip": 1e6, "step": step, "momentum": 0.9} for step in (0.1, 0.3, 1.0, 3.0)
        )
        plain = Batch(winner.model, "momentum", 60, settings)
        silent = dict.fromkeys(find("momentum").kinds, 0.0)
        found = [
            [
                self.errors(plain, world, 1 + t, silent).min().item()
                for t in range(self.effort.trials)
            ]
            for world in self.effort.worlds
        ]
        return np.array(found).mean(1)

    def _resolved(self, point: Point) -> Order:
        if point.algorithm == "momentum" and not point.momentum:
            named = "mb-sgd"
        else:
            named = point.algorithm
        if named == "momentum":
            momentum = point.momentum
        else:
            momentum = None
        return replace(
            self.order,
            algorithm=named,
            model=point.model,
            rounds=point.rounds,
            clip=point.clip,
            step=point.step,
            momentum=momentum,
            output=self.order.output or point.output,
        )

    def _told(self, point: Point, errors: np.ndarray) -> dict[str, Any]:
        order = self._resolved(point)
        named = {
            name: getattr(order, name)
            for name in ("model", "algorithm", "rounds", "clip", "step", "momentum", "output")
        }
        return named | {"error": float(errors.mean())}

    def _silo_words(self) -> list[dict[str, Any]]:
        """Of each silo: its part in what is learnt, and how the noise of the mean would change
        without it.
        """
        counts = self.facts.counts
        std = self.std
        if len(counts) == 1 or self.order.trust != "isrl":
            return [
                {"name": name, "records": n}
                for name, n in zip(self.facts.names, counts, strict=True)
            ]
        precision = 1 / std.square()
        noise = float((self.shares * std).square().sum().sqrt())
        found = []
        for i, (name, n) in enumerate(zip(self.facts.names, counts, strict=True)):
            others = [j for j in range(len(counts)) if j != i]
            kept = shares_of(
                Weights(self.order.weights, tuple(counts[j] for j in others)), std[others]
            )
            without = float((kept * std[others]).square().sum().sqrt())
            part = float(precision[i] / precision.sum())
            found.append(
                {
                    "name": name,
                    "records": n,
                    "part": part,
                    "noise_without": without / noise,
                    "too_small": part < SMALL,
                }
            )
        return found


@torch.no_grad()
def _error(problem: Problem, w: Tensor, sample: Sample) -> Tensor:
    """(J,): the share of wrong classes; for other labels the mean loss over that of an output of
    zero.
    """
    scores = problem.outputs(w, sample.test_x)
    y = sample.test_y
    bad = ~torch.isfinite(scores).all(-1)
    if _counted(sample.task):
        if scores.shape[-1] == 1:
            wrong = (scores.squeeze(-1) > 0) != (y > 0)
        else:
            wrong = scores.argmax(-1) != y
        return ((wrong | bad).double() * _importance(sample)).mean(-1)
    loss = torch.stack(
        [problem.record_losses(s, y) for s in scores.nan_to_num(0.0).clamp(-1e3, 1e3)]
    ).double()
    zero = problem.record_losses(torch.zeros_like(scores[0]), y).double().mean()
    return torch.where(bad.any(-1), 1e3, loss.mean(-1) / zero)


def _counted(task: Task) -> bool:
    """Whether a model is judged by the share of wrong classes; else by its loss."""
    return task.kind in ("binary", "multiclass")


def _importance(sample: Sample) -> Tensor:
    """Of each tested record, by the public weights of the classes; 1 on average."""
    weights = torch.tensor(
        sample.task.weights or (1.0,) * sample.task.classes, dtype=torch.float64
    )[sample.test_y]
    return weights / weights.mean()


def _guessing(sample: Sample) -> float:
    """The error of always saying the one class, or of an output of zero."""
    if not _counted(sample.task):
        return 1.0
    return 1 - float(torch.bincount(sample.test_y, _importance(sample)).max()) / len(sample.test_y)


def _weights(order: Order, facts: Facts) -> str:
    """By records, and by precision where the silos' budgets differ."""
    budgets = facts.budgets or targets(order, facts.names, facts.counts)
    if order.trust == "isrl" and len({b.epsilon for b in budgets}) > 1:
        return "precision"
    return "records"


def _of_totals(order: Order, counts: Sequence[int], who: Any) -> float:
    """How much more noise a total has than a curator's mean: the price counts on the smallest silos
    of the least cohort, less those who may collude, and on so many questions asked again. Refused
    where that leaves nobody to hide among."""
    least = least_of(order, who)
    released = sum(sorted(counts)[: least - order.colluding])
    return TOTALS * math.sqrt(
        (1 + order.drops) * sum(counts) * asked_at_least(who) / (who.silos * released)
    )


def _fewer(who: Any) -> float:
    """How much more noise the mean over those who take part in a round has than that over all."""
    least = getattr(who, "least", None)
    most = getattr(who, "answering", who.silos)
    return math.sqrt(who.silos / (((most if least is None else least) + most) / 2))
