"""What a model is to predict, all of it public: it decides the number of outputs and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.core.problem.losses import Loss

KINDS = ("binary", "multiclass", "ordinal", "regression", "count", "survival")


@dataclass(frozen=True)
class Task:
    """binary and multiclass have `classes`, and weights for them or none; ordinal has at least
    three, in order.

    regression has `huber`, or 0 for squares; count has `most`, the largest that there is; survival
    has `bins`.
    """

    kind: str
    classes: int = 0
    weights: tuple[float, ...] = ()
    huber: float = 0.0
    bins: int = 0
    most: float = 0.0

    @classmethod
    def plain(cls, classes: int) -> Task:
        """The task of a label that is one of so many classes, or a number if there are none."""
        if classes == 0:
            return cls("regression")
        return cls("binary" if classes == 2 else "multiclass", classes)

    def head(self, *, one_logit: bool = False) -> tuple[int, Loss]:
        """The outputs that a model needs and the loss on them; with one_logit two classes share one
        output.
        """
        from silodp.core.problem import losses  # torch takes seconds to load

        if self.kind == "survival":
            return self.bins, losses.Hazard(self.bins)
        if self.kind == "regression":
            return 1, losses.Huber(self.huber) if self.huber else losses.squared_error
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
        return outputs, losses.Weighted(loss, self.weights) if self.weights else loss

    def read(self, output: Tensor) -> Tensor:
        """What outputs (n, k) say: the chance of each class, the risk by the end of each time bin,
        a count's rate, or a number as the loss compares it.

        Weights of the classes are public, and taken back out: what was learnt are weighted odds,
        and what is said are the odds themselves.
        """
        import torch

        if self.kind == "survival":
            return 1 - torch.exp(
                -torch.nn.functional.softplus(output).cumsum(1)
            )  # the product of 1 - hazard, in a form that ONNX has
        if self.kind == "count":
            return output.exp().clamp(max=self.most)
        if self.kind == "ordinal":
            from silodp.core.problem.losses import Ordinal

            return Ordinal(self.classes).chances(output)
        if not self.classes:
            return output
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        return (output - output.new_tensor(self.weights).log() if self.weights else output).softmax(
            1
        )
