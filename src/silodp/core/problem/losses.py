"""Define per-record losses, and in closed form their gradients by the model's output.

A loss maps outputs (N, k) and targets (N, ...) to one number per record, (N,). Any torch loss that
treats records one at a time is allowed: the engine gives an unknown loss single records only. The
losses of this file are known to treat records one at a time, and `slope_of` has their slopes.

A loss must be a sum over records. Then replacing one record changes one clipped term, and that is
what the price is for. Cox's partial likelihood is not such a sum. Each event's term is a log-sum
over all who are still at risk. So one record is in the terms of all who die before it, and a silo's
own risk sets are not the federation's. `Hazard`, the discrete-time likelihood, answers the same
question record by record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import softplus

from silodp.core.errors import BadInput

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return -log softmax(output)[target], for logits (..., k) and labels (...) in 0..k-1.

    Another label gives NaN, and a zero gradient.
    """
    hit = target[..., None] == torch.arange(output.shape[-1], device=output.device)
    loss = output.logsumexp(-1) - torch.where(hit, output, 0).sum(-1)
    return torch.where(hit.any(-1), loss, torch.nan)


def logistic(output: Tensor, target: Tensor) -> Tensor:
    """Return log(1 + exp(z)) - target z, for one logit z (..., 1) and labels 0 or 1."""
    z = output.squeeze(-1)
    return softplus(z) - target * z


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return (output - target)^2, summed over the outputs (..., k).

    target is (..., k), or (...) for one output.
    """
    return (output - target.reshape(output.shape)).square().sum(-1)


def _cross_entropy_slope(output: Tensor, target: Tensor) -> Tensor:
    """Return softmax(output) - one-hot(target), and zero for a label outside."""
    hit = target[:, None, None] == torch.arange(output.shape[2], device=output.device)[:, None]
    slope = output.softmax(2).sub_(hit.to(output.dtype))
    # To count is to wait for a GPU, where a multiplication by 1 is cheaper.
    all_valid = not output.is_cuda and int(hit.count_nonzero()) == target.numel()
    if all_valid:
        return slope
    return slope.mul_(hit.any(2, keepdim=True))


def _logistic_slope(output: Tensor, target: Tensor) -> Tensor:
    """Return sigmoid(output) - target."""
    return output.sigmoid().sub_(target[:, None, None].to(output.dtype))


def _squared_error_slope(output: Tensor, target: Tensor) -> Tensor:
    """Return 2 (output - target)."""
    if target.dim() == 2:
        rows = target[..., None]
    else:
        rows = target
    return (output - rows.movedim(1, -1)[:, None].to(output.dtype)).mul_(2)


SLOPES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    cross_entropy: _cross_entropy_slope,
    logistic: _logistic_slope,
    squared_error: _squared_error_slope,
}
"""The gradient of each known loss by the outputs.

It maps outputs (S, J, k, n) and targets (S, n, ...) to (S, J, k, n), the axes of `clipping`.
"""


@dataclass(frozen=True, repr=False)
class Weighted:
    """weights[target] x `loss`, for public weights of the classes. It is still a sum over records.

    `loss` is cross_entropy or logistic.
    """

    loss: Loss
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.loss not in (cross_entropy, logistic):
            raise BadInput(
                f"the loss with class weights is {self.loss!r:.80}; it must be cross_entropy or "
                "logistic, so weigh another loss in its own function"
            )

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record."""
        return self._weight(output, target) * self.loss(output, target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the slope of each record, on the axes of SLOPES."""
        return SLOPES[self.loss](output, target).mul_(self._weight(output, target)[:, None, None])

    def _weight(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the weight of each record's class."""
        weights = torch.tensor(self.weights, dtype=output.dtype, device=output.device)
        return weights[target.long().clamp(0, len(self.weights) - 1)]

    def __repr__(self) -> str:
        return f"Weighted({self.loss.__name__}, {self.weights!r})"


@dataclass(frozen=True)
class Huber:
    """r^2 / 2 up to |r| = delta and delta (|r| - delta / 2) beyond, with r = output - target.

    It has one output (..., 1).
    """

    delta: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record."""
        r = (output.squeeze(-1) - target).abs()
        inside = r.clamp(max=self.delta)
        return inside * (r - inside / 2)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the slope of each record, on the axes of SLOPES."""
        return (output - target[:, None, None].to(output.dtype)).clamp_(-self.delta, self.delta)


@dataclass(frozen=True)
class Hazard:
    """Discrete-time survival: the sum of Bernoulli log-losses over the bins in which a record is at
    risk.

    Output k of (..., bins) is the logit of the hazard h_k. That is the chance that the event falls
    in bin k, if it has not happened before. target = 2 b + event. With event 1, the event was in
    bin b, and the loss is -log h_b - sum_{k<b} log(1 - h_k). With event 0, the record was last seen
    in bin b (b = bins: after all bins), and only the bins before b count. Another target gives NaN,
    and a zero gradient.
    """

    bins: int

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record."""
        bins = torch.arange(self.bins, device=output.device)
        survived, ended, valid = self._at_risk(target, bins)
        loss = torch.where(survived, softplus(output), 0) + torch.where(ended, softplus(-output), 0)
        return torch.where(valid[..., 0], loss.sum(-1), torch.nan)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the slope of each record, on the axes of SLOPES."""
        bins = torch.arange(self.bins, device=output.device)
        survived, ended, valid = self._at_risk(target[:, None], bins)
        survived = (survived & valid).movedim(-1, 2)
        ended = (ended & valid).movedim(-1, 2)
        chance = output.sigmoid()
        return torch.where(survived, chance, 0) + torch.where(ended, chance - 1, 0)

    def _at_risk(self, target: Tensor, bins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each bin whether the record survived it, whether its event is in it, and if it
        is valid.
        """
        code = target.long()[..., None]
        last = code.div(2, rounding_mode="floor")
        event = code % 2 == 1
        valid = (code >= 0) & (code <= 2 * self.bins)
        return bins < last, (bins == last) & event, valid


@dataclass(frozen=True)
class Poisson:
    """Counts: exp(z) - y z, the Poisson likelihood of the log-rate z (..., 1), for counts y in
    0..most.

    Above the public `most`, the rate continues as a straight line of that slope. So no gradient by
    z is larger than `most`. The loss is convex.
    """

    most: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record."""
        z = output.squeeze(-1)
        inside = z.clamp(max=math.log(self.most))
        return inside.exp() + self.most * (z - inside) - target * z

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the slope of each record, on the axes of SLOPES."""
        return output.exp().clamp_(max=self.most) - target[:, None, None].to(output.dtype)

    def predicted(self, output: Tensor) -> Tensor:
        """Return the rate of each record, at most `most`."""
        return output[..., 0].exp().clamp(max=self.most)


@dataclass(frozen=True)
class Ordinal:
    """Classes in order: the sum of the log-losses of "above class k" over all thresholds k.

    Output k of (..., classes - 1) is the logit of threshold k. With one score for all thresholds
    (`models` has such a head) these are the logits of proportional odds. The sum of their
    log-losses replaces the joint likelihood (CORAL, Cao et al. 2020). It is convex, has a slope of
    at most 1 for each threshold, and finds thresholds in order without a constraint. Another target
    gives NaN, and a zero gradient.
    """

    classes: int

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record."""
        above, valid = self._above(target, output)
        loss = (softplus(output) - torch.where(above, output, 0)).sum(-1)
        return torch.where(valid[..., 0], loss, torch.nan)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the slope of each record, on the axes of SLOPES."""
        above, valid = (part.movedim(-1, 2) for part in self._above(target[:, None], output))
        return output.sigmoid().sub_(above.to(output.dtype)).mul_(valid)

    def chances(self, output: Tensor) -> Tensor:
        """Return the chance of each class, (..., classes).

        Where noise has crossed two thresholds, the chance above the earlier counts for both.
        """
        # this is cummin, which ONNX does not have
        above = torch.stack(list(accumulate(output.sigmoid().unbind(-1), torch.minimum)), -1)
        from_class = torch.cat([torch.ones_like(above[..., :1]), above], -1)
        from_next = torch.cat([above, torch.zeros_like(above[..., :1])], -1)
        return from_class - from_next

    def predicted(self, output: Tensor) -> Tensor:
        """Return the most likely class."""
        return self.chances(output).argmax(-1)

    def _above(self, target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the class is above each threshold, and whether the class is valid."""
        place = target.long()[..., None]
        above = place > torch.arange(self.classes - 1, device=like.device)
        valid = (place >= 0) & (place < self.classes)
        return above, valid


WITH_PARAMETERS = (Weighted, Huber, Hazard, Poisson, Ordinal)


def predicted(loss: Loss, output: Tensor) -> Tensor:
    """Return the prediction of outputs (..., k): a class, or the rate of a count, (...).

    One output is a logit, and several are scores of classes.
    """
    if isinstance(loss, Poisson | Ordinal):
        return loss.predicted(output)
    if output.shape[-1] == 1:
        return (output[..., 0] > 0).long()
    return output.argmax(-1)


def slope_of(loss: Loss) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the slope of a loss of this file, on the axes of SLOPES, or None for any other
    loss.
    """
    if type(loss) in WITH_PARAMETERS:
        return loss.slope  # type: ignore[attr-defined]
    return next((slope for key, slope in SLOPES.items() if key is loss), None)
