"""Evaluate a model on the records that silos hold out, in simulation and over a network alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import Loss
from silodp.core.problem.schema import Label
from silodp.core.statistics import MAX_BINS
from silodp.core.weights import Weights
from silodp.server.estimates.expected import PRICES, best_bins, main_figure, precision, proposed
from silodp.server.estimates.groups import KIND, QUESTIONS, Groups, score_groups
from silodp.server.estimates.placing import RiskSpread, bins_of, spread_of
from silodp.server.estimates.scoring import (
    Asked,
    as_rows,
    asked_of,
    gaussian_for,
    kind_of,
    score,
)
from silodp.server.federation import Federation

SCORE = "score"
"""The question about all held-out records."""
USUAL_SHARE = 0.25
"""Held-out records for each training record: a fifth of all records is usually held out."""
BY = "by"
"""The question about the groups of a column."""


@dataclass(frozen=True)
class Wanted:
    """What the caller may choose. None leaves a choice to public facts.

    Args:
        bins: The number of bins of the risk.
        cap: Where a record's loss or error is clipped, in the label's own unit.
        threshold: The risk from which the second of two classes is predicted.
    """

    bins: int | None = None
    cap: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Judged:
    """The public facts of the model that is judged.

    Args:
        classes: The number of classes, 0 for other labels.
        label: The label of the schema, if there is one.
        loss: The loss that the model was trained with.
        summary: The run's result file, which may have what its recalibration has released.
        silos: The silos of the run's description, with `records` and `delta`.
    """

    classes: int
    label: Label | None
    loss: Loss | None
    summary: Mapping[str, Any]
    silos: Sequence[Mapping[str, Any]]

    @property
    def spread(self) -> RiskSpread:
        """Return how the model's risks are spread, as far as that is public."""
        if self.kind == "survival" or self.label is None:
            positive = 0.0
        else:
            positive = self.label.positive
        if self.kind == "binary":
            return spread_of(self.summary, positive)
        return spread_of({}, positive)

    @property
    def kind(self) -> str:
        """Return the task."""
        return kind_of(self.classes, self.label, self.loss)

    @property
    def threshold(self) -> float:
        """Return the risk from which the second class is predicted by default."""
        first, second = (self.label.weights if self.label else ()) or (1.0, 1.0)
        return first / (first + second)


@dataclass(frozen=True)
class Evaluation:
    """The public description of an evaluation. It decides the price before any record is read.

    Args:
        names: The silos.
        held_out: The number of held-out records of each silo.
        budgets: What each silo pays for all questions together.
        groups: The groups that are compared too, or None.
        trust: Who sees what: isrl, masks, shuffle or central.
        counted: The silos whose noise a total counts on.
        asked: What the score of all records is asked for.
        spread: How the model's risks are spread, as far as that is public.
    """

    names: Sequence[str]
    held_out: Sequence[int]
    budgets: Sequence[Budget]
    groups: Groups | None
    trust: str
    counted: int
    asked: Asked
    spread: RiskSpread

    @classmethod
    def of(
        cls,
        judged: Judged,
        wanted: Wanted,
        *,
        names: Sequence[str],
        held_out: Sequence[int],
        budgets: Sequence[Budget],
        groups: Groups | None,
        trust: str,
        counted: int,
    ) -> Evaluation:
        """Return the evaluation with everything that the caller left open.

        Without `wanted.bins` there are as many bins as give the AUC the narrowest interval: more
        bins have more noise, and fewer have more pairs in one bin. The number follows from the run
        and the price. So the question stays the same if silos join or leave later, and a silo that
        has answered it does not pay again.
        """
        kind = judged.kind
        if wanted.threshold is not None and kind != "binary":
            raise BadInput(
                f"--threshold is {wanted.threshold:g}, but the label is no yes or no; leave it out"
            )
        threshold = judged.threshold if wanted.threshold is None else wanted.threshold
        spread = judged.spread
        about = judged.classes, judged.label, judged.loss
        asked = asked_of(*about, cap=wanted.cap)
        made = cls(names, held_out, budgets, groups, trust, counted, asked, spread)
        if kind not in ("binary", "survival"):
            return made
        count = wanted.bins
        if count is None:
            usual = made.of_run(judged.silos)
            count = best_bins(spread, threshold, sum(usual.held_out), usual.noise())
        if not 2 <= count <= MAX_BINS:
            raise BadInput(f"--bins is {count}; it must be from 2 to {MAX_BINS}")
        bins = bins_of(spread, count, threshold)
        return replace(made, asked=asked_of(*about, cap=wanted.cap, bins=bins))

    def of_run(self, silos: Sequence[Mapping[str, Any]]) -> Evaluation:
        """Return the evaluation by all silos of the run, each with the usual share held out."""
        held_out = [max(1, round(USUAL_SHARE * silo["records"])) for silo in silos]
        price = max(budget.epsilon for budget in self.budgets)
        budgets = [Budget(price, silo["delta"]) for silo in silos]
        names = [silo["name"] for silo in silos]
        return replace(self, names=names, held_out=held_out, budgets=budgets, groups=None)

    @property
    def questions(self) -> int:
        """Return the number of questions that share the budgets."""
        if self.groups:
            return QUESTIONS
        return 1

    @property
    def edges(self) -> list[float]:
        """Return the edges between the bins of the risk's logit."""
        return list(self.asked.bins.edges) if self.asked.bins else []

    def noise(self) -> float:
        """Return the standard deviation of the noise in each number of the mean over all silos."""
        mechanism = gaussian_for(
            SCORE, self.budgets, self.questions, trust=self.trust, counted=self.counted
        )
        statistic = self.asked.statistic(torch.zeros(1, 1))
        if self.asked.kind in ("binary", "survival"):
            statistic = replace(statistic, bins=2)  # any number of bins has the same sensitivity
        silos = range(len(self.names))
        weights = Weights("records", tuple(self.held_out))
        return float(mechanism.clipped(statistic.norm).deviation(silos, weights)[0].max())

    @property
    def prevalence(self) -> float | None:
        """Return the prevalence that the expected precision assumes, if it assumes one."""
        return self.spread.prevalence if self.asked.bins else None

    def precision(self) -> dict[str, float]:
        """Return half the width that each figure's interval is expected to have."""
        return precision(self.asked, self.spread, sum(self.held_out), self.noise())

    def run(self, w: Tensor, port: Callable[[str], Federation]) -> dict[str, Any]:
        """Return the scores of a model, the silos without an answer, and the groups if wanted.

        `port` returns the federation for a question, `SCORE` or `BY`. Groups come first: where no
        policy allows them, nothing is paid. If only the score of all records is refused, the
        answer contains the groups, which were paid for, and the reason as "refused".
        """
        counting = {"trust": self.trust, "counted": self.counted}
        answer: dict[str, Any] = {}
        if self.groups:
            without: dict[str, str] = {}
            mechanism = gaussian_for(KIND, self.budgets, self.questions, **counting)
            groups = score_groups(port(BY), w, mechanism, self.groups, self.held_out, without)
            if without:
                groups = groups | {"without": without}
            answer["groups"] = groups
        without = {}
        mechanism = gaussian_for("score", self.budgets, self.questions, **counting)
        try:
            scores = score(
                port(SCORE),
                w,
                mechanism,
                names=self.names,
                held_out=self.held_out,
                asked=self.asked,
                without=without,
            )
        except BadInput as refusal:
            if not self.groups:
                raise
            return answer | {"refused": str(refusal)}
        answer["scores"] = as_rows(scores, self.asked)
        if without:
            answer["without"] = without
        return answer


def forecast(at: Callable[[float], Evaluation]) -> dict[str, Any]:
    """Return the precision of each figure at several prices, and a proposed price, for --json.

    Nothing is asked. `at` returns the evaluation at a price.
    """
    known = {price: at(price).precision() for price in PRICES}

    def widths(price: float) -> dict[str, float]:
        return known.get(price) or at(price).precision()

    evaluation = at(PRICES[0])
    name = main_figure(known[PRICES[0]])
    price = proposed(widths)
    rows = [{"epsilon": price, "within": finite(found)} for price, found in known.items()]
    return {
        "forecast": rows,
        "figure": name,
        "proposed_epsilon": price,
        "held_out": sum(evaluation.held_out),
        "prevalence": evaluation.prevalence,
        "released": evaluation.spread.released,
    }


def expectation(evaluation: Evaluation) -> dict[str, Any]:
    """Return the precision that an evaluation is expected to have, and the largest epsilon that a
    silo pays. Nothing is asked.
    """
    within = evaluation.precision()
    figure = main_figure(within)
    return {
        "figure": figure,
        "within": finite(within)[figure],
        "epsilon": max(budget.epsilon for budget in evaluation.budgets),
    }


def finite(widths: Mapping[str, float]) -> dict[str, float | None]:
    """Return the widths for --json: None for a figure that the noise will hide."""
    return {name: width if math.isfinite(width) else None for name, width in widths.items()}
