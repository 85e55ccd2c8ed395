"""Evaluate a model on the records that silos hold out, in simulation and over a network alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget
from silodp.server.estimates.groups import KIND, QUESTIONS, Groups, score_groups
from silodp.server.estimates.scoring import as_rows, gaussian_for, score
from silodp.server.federation import Federation

SCORE = "score"
"""The question about all held-out records."""
BY = "by"
"""The question about the groups of a column."""


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
        asked: The arguments of `score`: classes, bins, cap, label and loss.
    """

    names: Sequence[str]
    held_out: Sequence[int]
    budgets: Sequence[Budget]
    groups: Groups | None
    trust: str
    counted: int
    asked: dict[str, Any]

    @property
    def questions(self) -> int:
        """Return the number of questions that share the budgets."""
        if self.groups:
            return QUESTIONS
        return 1

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
                without=without,
                **self.asked,
            )
        except BadInput as refusal:
            if not self.groups:
                raise
            return answer | {"refused": str(refusal)}
        answer["scores"] = as_rows(scores, self.asked["classes"])
        if without:
            answer["without"] = without
        return answer
