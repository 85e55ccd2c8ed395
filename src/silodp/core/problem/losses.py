"""Per-record losses, and in closed form their gradients by the model's output.

A loss takes outputs (N, k) and targets (N, ...) to one number per record, (N,). Any torch loss that
sees one record at a time will do (the engine shows an unknown loss single records only); those of
this file are known to be record by record, and `slope_of` has their slopes.

A loss must be a sum over records: then replacing one record changes one clipped term, which is what
is priced. Cox's partial likelihood is no such sum: each event's term is a log-sum over everybody
still at risk, so one record enters the terms of all who die before it, and a silo's own risk sets
are not the federation's. `Hazard`, the discrete-time likelihood, asks the same question record by
record.
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
    """-log softmax(output)[target], for logits (..., k) and labels (...) in 0..k-1; another label
    gives NaN, and a zero gradient.
    """
    hit = target[..., None] == torch.arange(output.shape[-1], device=output.device)
    loss = output.logsumexp(-1) - torch.where(hit, output, 0).sum(-1)
    return torch.where(hit.any(-1), loss, torch.nan)


def logistic(output: Tensor, target: Tensor) -> Tensor:
    """log(1 + exp(z)) - target z, for one logit z (..., 1) and labels 0 or 1."""
    z = output.squeeze(-1)
    return softplus(z) - target * z


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """(output - target)^2, summed over the outputs (..., k); target is (..., k), or (...) for one
    output.
    """
    return (output - target.reshape(output.shape)).square().sum(-1)


def _cross_entropy_slope(output: Tensor, target: Tensor) -> Tensor:
    hit = target[:, None, None] == torch.arange(output.shape[2], device=output.device)[:, None]
    slope = output.softmax(2).sub_(hit.to(output.dtype))
    seen = (
        not output.is_cuda and int(hit.count_nonzero()) == target.numel()
    )  # to look at numbers is to wait for a GPU
    if seen:
        return slope
    return slope.mul_(hit.any(2, keepdim=True))


def _logistic_slope(output: Tensor, target: Tensor) -> Tensor:
    return output.sigmoid().sub_(target[:, None, None].to(output.dtype))


def _squared_error_slope(output: Tensor, target: Tensor) -> Tensor:
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
"""Gradient of each known loss by the outputs: outputs (S, J, k, n) and targets (S, n, ...) to (S,
J, k, n), the axes of `clipping`.
"""


@dataclass(frozen=True, repr=False)
class Weighted:
    """weights[target] x `loss`, which is cross_entropy or logistic, for public weights of the
    classes; still a sum over records.
    """

    loss: Loss
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.loss not in (cross_entropy, logistic):
            raise BadInput(
                "class weights are for cross_entropy and logistic; weigh another loss in "
                "its own function"
            )

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self._weight(output, target) * self.loss(output, target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return SLOPES[self.loss](output, target).mul_(self._weight(output, target)[:, None, None])

    def _weight(self, output: Tensor, target: Tensor) -> Tensor:
        weights = torch.tensor(self.weights, dtype=output.dtype, device=output.device)
        return weights[target.long().clamp(0, len(self.weights) - 1)]

    def __repr__(self) -> str:
        return f"Weighted({self.loss.__name__}, {self.weights!r})"


@dataclass(frozen=True)
class Huber:
    """r^2 / 2 up to |r| = delta and delta (|r| - delta / 2) beyond, r = output - target, for one
    output (..., 1).
    """

    delta: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        r = (output.squeeze(-1) - target).abs()
        inside = r.clamp(max=self.delta)
        return inside * (r - inside / 2)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target[:, None, None].to(output.dtype)).clamp_(-self.delta, self.delta)


@dataclass(frozen=True)
class Hazard:
    """Discrete-time survival: the sum of Bernoulli log-losses over the time bins in which the
    record is at risk.

    Output k of (..., bins) is the logit of the hazard h_k, the chance that the event falls in bin k
    given that it has not come before. target = 2 b + event: with event 1 it fell in bin b, and the
    loss is -log h_b - sum_{k<b} log(1 - h_k); with event 0 the record was last seen in bin b (b =
    bins: after all of them), and only the bins before it count. Another target gives NaN, and a
    zero gradient.
    """

    bins: int

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        survived, ended, known = self._at_risk(
            target, torch.arange(self.bins, device=output.device)
        )
        loss = torch.where(survived, softplus(output), 0) + torch.where(ended, softplus(-output), 0)
        return torch.where(known[..., 0], loss.sum(-1), torch.nan)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        survived, ended, known = self._at_risk(
            target[:, None], torch.arange(self.bins, device=output.device)
        )
        survived, ended = ((part & known).movedim(-1, 2) for part in (survived, ended))
        chance = output.sigmoid()
        return torch.where(survived, chance, 0) + torch.where(ended, chance - 1, 0)

    def _at_risk(self, target: Tensor, bins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = target.long()[..., None]
        last = code.div(2, rounding_mode="floor")
        event = code % 2 == 1
        return bins < last, (bins == last) & event, (code >= 0) & (code <= 2 * self.bins)


@dataclass(frozen=True)
class Poisson:
    """Counts: exp(z) - y z, the Poisson likelihood of the log-rate z (..., 1), for counts y in
    0..most.

    Above the public `most` the rate goes on as a straight line of that slope, so that no gradient
    by z is larger than `most`. Convex.
    """

    most: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        z = output.squeeze(-1)
        inside = z.clamp(max=math.log(self.most))
        return inside.exp() + self.most * (z - inside) - target * z

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return output.exp().clamp_(max=self.most) - target[:, None, None].to(output.dtype)

    def predicted(self, output: Tensor) -> Tensor:
        return output[..., 0].exp().clamp(max=self.most)


@dataclass(frozen=True)
class Ordinal:
    """Classes in order: for each threshold k the log-loss of "above class k", summed; output k of
    (..., classes - 1) is its logit.

    With one score for all thresholds (`models` has such a head) these are the logits of
    proportional odds. The sum of their log-losses in place of the joint likelihood (CORAL, Cao et
    al. 2020) is convex, has a slope of at most 1 for each threshold, and finds thresholds in order
    without a constraint. Another target gives NaN, and a zero gradient.
    """

    classes: int

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        above, known = self._above(target, output)
        return torch.where(
            known[..., 0], (softplus(output) - torch.where(above, output, 0)).sum(-1), torch.nan
        )

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        above, known = (part.movedim(-1, 2) for part in self._above(target[:, None], output))
        return output.sigmoid().sub_(above.to(output.dtype)).mul_(known)

    def chances(self, output: Tensor) -> Tensor:
        """(..., classes); where noise has crossed thresholds, the later is taken for the
        earlier.
        """
        above = torch.stack(
            list(accumulate(output.sigmoid().unbind(-1), torch.minimum)), -1
        )  # cummin, which ONNX has not
        return torch.cat([torch.ones_like(above[..., :1]), above], -1) - torch.cat(
            [above, torch.zeros_like(above[..., :1])], -1
        )

    def predicted(self, output: Tensor) -> Tensor:
        return self.chances(output).argmax(-1)

    def _above(self, target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        place = target.long()[..., None]
        return place > torch.arange(self.classes - 1, device=like.device), (place >= 0) & (
            place < self.classes
        )


WITH_PARAMETERS = (Weighted, Huber, Hazard, Poisson, Ordinal)


def predicted(loss: Loss, output: Tensor) -> Tensor:
    """The class, or of a count its rate, that outputs (..., k) stand for, (...): one output is a
    logit, several are scores of classes.
    """
    if isinstance(loss, Poisson | Ordinal):
        return loss.predicted(output)
    if output.shape[-1] == 1:
        return (output[..., 0] > 0).long()
    return output.argmax(-1)


def slope_of(loss: Loss) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The slope of a loss of this file, on the axes of SLOPES; None for any other loss."""
    if type(loss) in WITH_PARAMETERS:
        return loss.slope  # type: ignore[attr-defined]
    return next((slope for known, slope in SLOPES.items() if known is loss), None)
