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
from silodp.core.weights import Weights
from silodp.host.extension import load as from_file
from silodp.server.advice.candidates import (
    CAUTIONS,
    EFFORTS,
    LOUD,
    MOMENTA,
    MORE_ROUNDS,
    MOST_PRODUCTS,
    ONE_SHOT,
    QUIET,
    SCALED_CLIPS,
    SCALED_LENGTHS,
    SCALED_ROUNDS,
    WHOLE,
    WITH_MOMENTUM,
    Batch,
    Effort,
    Point,
    cautious,
    models_for,
    near,
    points_of,
    regrets,
    regrouped,
    rounded,
)
from silodp.server.advice.facts import Facts
from silodp.server.advice.judging import (
    constant_loss,
    counted,
    judged,
    relative_loss,
)
from silodp.server.advice.pool import Pool, noise_of, pooled, shares_of
from silodp.server.advice.worlds import SQUARE, WORLDS, Sample, draw
from silodp.server.algorithms import ALGORITHMS, find
from silodp.server.estimates.recalibration import SHARE
from silodp.server.estimates.shrinkage import CAUTION
from silodp.server.estimates.start import MEAN_SHARE
from silodp.server.federation import StopRun
from silodp.server.order import Order, targets
from silodp.server.prepare import asked_at_least, least_of, prepare
from silodp.server.settings import participation_by_name

LARGE = 5000
"""Records from which candidates are tried on twice as many made-up ones."""
CALIBRATED = 400.0
"""Records x mu from which the answer by which risks are recalibrated is worth its price: below it
the shift of the mean outcome is known to no better than 2.5 points.
"""
DOUBT = 0.03
MEAN_SHARES = (MEAN_SHARE, 0.4)
"""Noise that is wanted in the mean outcome with which training starts, and the least and the most
of the budget that it may cost.
"""
FIRST_WORLDS = 5
SECOND = 20
FINALISTS = 6
"""On how many worlds every candidate is tried, how many candidates are tried on all worlds (and
those near them), and how many on fresh records.
"""

SMALL = 0.03
"""Share of what is learnt (of all silos' precision) below which a silo's budget is better kept."""


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
        """Return whether the model is expected to be better than guessing."""
        return self.expected["enough"]

    def words(self) -> dict[str, Any]:
        """Return the advice for run.json and --json."""
        return {
            "order": self.order.words(),
            "expected": self.expected,
            "silos": list(self.silos),
            "tried": list(self.tried),
        } | ({"left_out": list(self.left_out)} if self.left_out else {})


def choose(
    order: Order, facts: Facts, *, load: Load = from_file, effort: Effort | None = None
) -> Advice:
    """Return the order with everything decided that it leaves open; what it says stays as it is."""
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
            who = participation_by_name(order.participation, len(facts.counts), order.coins)()
            self.worth /= _of_totals(order, who)
        if order.recalibration is None:
            self.order = order = replace(self.order, recalibration=self._recalibration())
        if order.model:
            self.models = [order.model]
        else:
            self.models = models_for(facts, self.worth)
        self.effort = effort or self._effort()
        # by the number of records alone: all trusts are compared on the same made-up records
        larger = 2 if sum(facts.counts) > LARGE else 1
        self.records = min(whole, self.effort.pool * larger)

    def _recalibration(self) -> float:
        """Return the share of the budget for recalibration, by a public rule: some where the answer
        is not drowned by its noise, and the silos and the model can be asked.
        """
        task = self.facts.plain
        asked = task.kind != "regression" and self.facts.allow("RiskCells")
        ready = self.order.noise == "exact" and not self.order.loss
        own = bool(self.order.model) and is_file(self.order.model)
        if asked and ready and not own and self.order.model != "cnn" and self.worth >= CALIBRATED:
            return SHARE
        return 0.0

    def advice(self) -> Advice:
        """Return the choice by successive halving on common random numbers: every candidate on some
        of the worlds, the better ones and those near them on all worlds, and the best on fresh
        records.
        """
        every = self.effort.worlds
        wanted = self._outputs()
        points = [
            (point, j)
            for batch in self.batches()
            for j, point in enumerate(points_of(batch))
            if point.output in wanted
        ]
        candidates = [point for point, _ in points]
        around = near(candidates)
        first = self._tried(candidates, every[:: max(1, len(every) // FIRST_WORLDS)], 0)
        better = _best(cautious(regrets(first), around), SECOND)
        again = dict.fromkeys(better) | dict.fromkeys(q for p in better for q in around[p])
        second = self._tried(list(again), every, 1)
        hedged = cautious(regrets(second), around)
        finalists = _best({point: hedged[point] for point in better}, FINALISTS)
        trials = [self._tried(finalists, every, 2 + t) for t in range(self.effort.trials)]
        losses = {point: np.stack([found[point] for found in trials], 1) for point in finalists}
        means = {point: found.mean(1) for point, found in losses.items()}
        fresh = regrets(means)
        final = {point: fresh[point] + hedged[point] for point in finalists}
        ranked = sorted(finalists, key=final.__getitem__)
        return self._advised(
            ranked[0], losses[ranked[0]], [self._candidate_words(p, means[p]) for p in ranked]
        )

    @property
    def _doubt(self) -> float | None:
        """Return the noise in the mean outcome of the question that recalibrates the model, if it
        is asked.
        """
        if not self.order.recalibration:
            return None
        return math.sqrt(8 / self.order.recalibration) / self.worth

    def _outputs(self) -> tuple[str, ...]:
        """Return which iterates are compared."""
        if self.order.output is None:
            return ("last", "tail")
        if self.order.output == "tail":
            return ("tail",)
        return ("last",)

    def _tried(
        self, points: Sequence[Point], worlds: Sequence[int], trial: int
    ) -> dict[Point, np.ndarray]:
        """Return each candidate's loss in each world, as a share of a constant's."""
        found: dict[Point, list[float]] = {point: [] for point in points}
        for batch, members in regrouped(points):
            for world in worlds:
                losses = self.losses(batch, world, trial)
                for point, j in members:
                    found[point].append(float(losses[j, int(point.output == "tail")]))
        return {point: np.array(rows) for point, rows in found.items()}

    def _effort(self) -> Effort:
        """Return the effort by the size of the first model. If models that bend are tried too, they
        take longer, and with less noise fewer samples will do.
        """
        first = self._problem(self.models[0])
        known = not is_file(self.models[0]) and first.known_loss and self.models[0] != "cnn"
        effort = next(
            effort for effort in EFFORTS if first.dim * (1 if known else 200) <= effort.parameters
        )
        if len(self.models) == 1:
            return effort
        return replace(effort, trials=min(effort.trials, 2))

    # --- what is tried ---------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        order = self.order
        base = 0.5 * math.sqrt(1 + sum(SQUARE[kind] for kind in self.facts.kinds))
        if order.clip is not None:
            clips = [order.clip]
        else:
            clips = [rounded(base * share) for share in self._clips()]
        if order.momentum is not None:
            momenta = [order.momentum]
        else:
            momenta = MOMENTA
        scaled = self._scaled_fits()
        found = []
        for model, rounds in [
            (m, r)
            for m in self.models
            for r in ([order.rounds] if order.rounds is not None else self._rounds(m))
        ]:
            # Of the others only what is near the best of a line: fewer settings.
            first = model == self.models[0]
            if first and scaled:
                continue
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
        if scaled:
            found += self._scaled(momenta[-1])
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

    def _scaled_fits(self) -> bool:
        """Return whether the first model can be trained in standardised features."""
        line = self.models[0] in ("linear", "logistic")
        raw = any(kind != "standard" for kind in self.facts.kinds)
        asked = ["ScaledGrad", "Moments", "RiskCells" if self.facts.plain.bins else "Outcomes"]
        allowed = all(map(self.facts.allow, asked))
        return line and raw and allowed and self.order.prox == "zero" and not self.order.loss

    def _scaled(self, momentum: float) -> list[Batch]:
        """Return the candidates of the first model in standardised features, whose gradients all
        have about one length.
        """
        order = self.order
        usual = 0.5 * math.sqrt(1 + len(self.facts.kinds))
        clips = [rounded(usual * share) for share in SCALED_CLIPS]
        if order.clip is not None:
            clips = [order.clip]
        rounds = [r for r, least in SCALED_ROUNDS.items() if self.worth >= least]
        if order.rounds is not None:
            rounds = [order.rounds]
        points = tuple(
            {
                "clip": clip,
                "step": rounded(length / clip) if order.step is None else order.step,
                "momentum": momentum,
                "caution": caution,
            }
            for clip in clips
            for length in (SCALED_LENGTHS if order.step is None else (1.0,))
            for caution in (CAUTIONS if self.worth < LOUD else CAUTIONS[:1])
        )
        return [Batch(self.models[0], "scaled", r, points) for r in rounds]

    def _clips(self) -> tuple[float, ...]:
        """Return the clips in units of a typical gradient at a risk of a half. Where the outcome is
        known to be rare most gradients are shorter from the start.
        """
        if 0 < self.facts.plain.positive < 0.2:
            return (self.effort.clips[0] / 2, *self.effort.clips)
        return self.effort.clips

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
        return ONE_SHOT in ALGORITHMS and linear and not said and few

    def _rounds(self, model: str) -> tuple[int, ...]:
        if model.startswith("mlp"):
            if self.effort.rounds[-1] < 50:
                return self.effort.rounds[-2:]
            return (50, 100)
        if model != self.models[0]:
            return self.effort.rounds[-3:]
        if self.worth < LOUD:
            return tuple(r for r in self.effort.rounds if r <= 25)
        if self.worth > QUIET and len(self.effort.rounds) > 3:
            return self.effort.rounds[1:] + MORE_ROUNDS
        return self.effort.rounds

    # --- trying it -------------------------------------------------------------------------------

    def losses(
        self, batch: Batch, world: int, trial: int, noise: Mapping[str, float] | None = None
    ) -> Tensor:
        """Return (J, 2): the loss of each point's last iterate, and of the average of the later
        half, as a share of a constant's.
        """
        problem = self._problem(batch.model)
        sample = self.sample(world, trial)
        ends = self.ends(batch, world, trial, noise)
        doubt = self._doubt if noise is None else None
        return torch.stack([relative_loss(problem, w, sample, doubt) for w in ends], 1)

    def ends(
        self, batch: Batch, world: int, trial: int, noise: Mapping[str, float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (J, d) twice: each point's last iterate, and the average of the later half."""
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
        try:
            for r, last in enumerate(
                algorithm.run(fed, problem, start, **{**settings, **columns}, **mechanisms)
            ):
                if r >= batch.rounds // 2:
                    tail = tail + last
                    kept = kept + 1
        except StopRun:  # one-shot has refused to make a model
            return start * math.nan, start * math.nan
        return last, tail / max(kept, 1)

    def _settled(self, batch: Batch) -> Order:
        """Return the order for the plan. Noise depends on neither clip nor step."""
        if self.order.totals:
            order = self.order.under("central")
        else:
            order = self.order
        return replace(
            order,
            settings=self._settings(batch.algorithm),
            algorithm=batch.algorithm,
            model=batch.model,
            rounds=batch.rounds,
            clip=1.0,
            step=1.0,
            momentum=0.5,
            output="last",
        )

    def _settings(self, algorithm: str, caution: float = CAUTION) -> tuple[str, ...]:
        """Return the algorithm's own settings: what the order says, and how much of the budget the
        mean outcome gets, more where noise would hide it.
        """
        said = self.order.settings
        if algorithm != "scaled" or any(text.startswith("mean_share=") for text in said):
            return said
        least, most = MEAN_SHARES
        share = rounded(min(max((1 / DOUBT / self.worth) ** 2, least), most))
        said = (*said, f"mean_share={share:g}")
        if caution == CAUTION:
            return said
        return (*said, f"caution={caution:g}")

    def _noise_of(self, batch: Batch) -> dict[str, float]:
        key = batch.algorithm, batch.rounds
        if key not in self._noise:
            facts = self.facts
            order = self._settled(batch)
            made = prepare(
                order, facts.names, facts.counts, budgets=facts.budgets, scaled=facts.scaled
            )
            who = made.participation()
            factor = _fewer(who)
            if self.order.totals:
                factor *= _of_totals(self.order, who)
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

    def _advised(self, winner: Point, losses: np.ndarray, tried: list[dict[str, Any]]) -> Advice:
        """Return the advice; `losses` (worlds, trials) are the winner's."""
        plain_losses, plain = self._without_noise(winner)
        found = self._judged(winner)
        loss = float(losses.mean())
        spread = float(losses.std(1, ddof=min(1, losses.shape[1] - 1)).mean())
        problem = self._problem(winner.model)
        constant = float(
            np.mean([constant_loss(problem, self.sample(w, 2)) for w in self.effort.worlds])
        )
        gain = constant - loss
        most = constant - float(plain_losses.mean())
        guess = np.array([row["guessing"] for row in found])
        errors = np.array([row["error"] for row in found])
        if counted(self.facts.plain):
            judged = errors
            without = float(np.mean([row["error"] for row in plain]))
        else:
            judged = losses.mean(1)
            without = float(plain_losses.mean())
        expected = {
            "measure": "error" if counted(self.facts.plain) else "loss",
            "weighed": bool(self.facts.plain.weights),
            "error": float(judged.mean()),
            "run_to_run": spread,
            "middle": [float(q) for q in np.quantile(judged, [0.25, 0.75])],
            "not_private": without,
            "guessing": float(guess.mean()),
            "loss": loss,
            "loss_not_private": float(plain_losses.mean()),
            "loss_of_constant": constant,
            "enough": gain > max(spread, 0.2 * most),
        }
        for name in ("log_loss", "auc", "slope"):
            if name in found[0]:
                expected[name] = [
                    float(np.median([row[name] for row in rows])) for rows in (found, plain)
                ]
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

    def _judged(self, winner: Point) -> list[dict[str, float]]:
        """Return what the winner is like in each world, in words that people use."""
        batch, _ = regrouped([winner])[0]
        found = []
        for world in self.effort.worlds:
            w = self.ends(batch, world, 2)[int(winner.output == "tail")]
            problem = self._problem(batch.model)
            found.append(judged(problem, w, self.sample(world, 2), self._doubt))
        return found

    def _without_noise(self, winner: Point) -> tuple[np.ndarray, list[dict[str, float]]]:
        """Return the loss in each world of the winner's model at the best of a few steps, without
        noise, and what it is like.
        """
        settings = tuple(
            {"clip": 1e6, "step": step, "momentum": 0.9} for step in (0.1, 0.3, 1.0, 3.0)
        )
        plain = Batch(winner.model, "momentum", 60, settings)
        silent = dict.fromkeys(find("momentum").kinds, 0.0)
        problem = self._problem(winner.model)
        losses = []
        words = []
        for world in self.effort.worlds:
            sample = self.sample(world, 2)
            last, _ = self.ends(plain, world, 2, silent)
            found = relative_loss(problem, last, sample)
            best = int(found.argmin())
            losses.append(float(found[best]))
            words.append(judged(problem, last[best : best + 1], sample))
        return np.array(losses), words

    def _resolved(self, point: Point) -> Order:
        if point.algorithm == "momentum" and not point.momentum:
            named = "mb-sgd"
        else:
            named = point.algorithm
        if named in WITH_MOMENTUM:
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
            settings=self._settings(named, point.caution),
        )

    def _candidate_words(self, point: Point, losses: np.ndarray) -> dict[str, Any]:
        order = self._resolved(point)
        named = {
            name: getattr(order, name)
            for name in ("model", "algorithm", "rounds", "clip", "step", "momentum", "output")
        }
        return named | {"loss": float(losses.mean())}

    def _silo_words(self) -> list[dict[str, Any]]:
        """Return for each silo its part in what is learnt, and how the noise of the mean would
        change without it.
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


def _best(score: Mapping[Point, float], number: int) -> list[Point]:
    return sorted(score, key=score.__getitem__)[:number]


def _weights(order: Order, facts: Facts) -> str:
    """Return the weights: by records, and by precision where the silos' budgets differ."""
    budgets = facts.budgets or targets(order, facts.names, facts.counts)
    if order.trust == "isrl" and len({b.epsilon for b in budgets}) > 1:
        return "precision"
    return "records"


def _of_totals(order: Order, who: Any) -> float:
    """Return how much more noise a total has than a curator's mean.

    Every silo adds the same share. The price counts on the shares of the least cohort without the
    silos that may collude, and on some questions that are asked again. Raise BadInput if no silo is
    left to count on.
    """
    counted = least_of(order, who) - order.colluding
    return math.sqrt((1 + order.drops) * asked_at_least(who) / counted)


def _fewer(who: Any) -> float:
    """Return how much more noise the mean over those who take part in a round has than that over
    all.
    """
    least = getattr(who, "least", None)
    most = getattr(who, "answering", who.silos)
    return math.sqrt(who.silos / (((most if least is None else least) + most) / 2))
