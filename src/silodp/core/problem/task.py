"""Define what a model predicts, all of it public. It decides the number of outputs and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.core.problem.losses import Loss

KINDS = ("binary", "multiclass", "ordinal", "regression", "count", "survival")


@dataclass(frozen=True)
class Task:
    """What a model predicts.

    - binary and multiclass have `classes`, and weights for them or none.
    - ordinal has at least three classes, in order.
    - regression has `huber`, or 0 for squares.
    - count has `most`, the largest count.
    - survival has `bins`.
    """

    kind: str
    classes: int = 0
    weights: tuple[float, ...] = ()
    huber: float = 0.0
    bins: int = 0
    periods: tuple[float, ...] = ()
    """Of survival: the length of each time bin, if it is known."""
    most: float = 0.0
    positive: float = 0.0
    """Of two classes: a public estimate of the share of the second; 0 where there is none."""

    @classmethod
    def plain(cls, classes: int) -> Task:
        """Return the task of a label that is one of so many classes, or a number if there are
        none.
        """
        if classes == 0:
            return cls("regression")
        if classes == 2:
            return cls("binary", classes)
        return cls("multiclass", classes)

    def head(self, *, one_logit: bool = False) -> tuple[int, Loss]:
        """Return the number of outputs that a model needs, and the loss on them.

        With `one_logit` two classes share one output.
        """
        from silodp.core.problem import losses  # torch takes seconds to load

        if self.kind == "survival":
            return self.bins, losses.Hazard(self.bins)
        if self.kind == "regression":
            if self.huber:
                return 1, losses.Huber(self.huber)
            return 1, losses.squared_error
        if self.kind == "count":
            return 1, losses.Poisson(self.most)
        if self.kind == "ordinal":
            return self.classes - 1, losses.Ordinal(self.classes)
        if one_logit and self.classes == 2:
            outputs = 1
            loss = losses.logistic
        else:
            outputs = self.classes
            loss = losses.cross_entropy
        if self.weights:
            return outputs, losses.Weighted(loss, self.weights)
        return outputs, loss

    def read(self, output: Tensor) -> Tensor:
        """Return the predictions of outputs (n, k).

        They are the chance of each class, the risk by the end of each time bin, a count's rate, or
        a number on the scale of the loss. The weights of the classes are public and are divided
        out: training learns weighted odds, and a prediction gives the odds themselves.
        """
        import torch

        if self.kind == "survival":
            # the product of 1 - hazard, in a form that ONNX has
            survived = torch.exp(-torch.nn.functional.softplus(output).cumsum(1))
            return 1 - survived
        if self.kind == "count":
            return output.exp().clamp(max=self.most)
        if self.kind == "ordinal":
            from silodp.core.problem.losses import Ordinal

            return Ordinal(self.classes).chances(output)
        if not self.classes:
            return output
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        if self.weights:
            output = output - output.new_tensor(self.weights).log()
        return output.softmax(1)
