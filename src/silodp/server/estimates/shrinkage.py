"""How much of a model's slopes is noise, and the slopes without it, as far as that can be said.

The noise of every answer is public. So is what becomes of it: a step carries it into the slopes,
and the steps after that draw it back, by the curvature of the loss. The slopes that were found are
as long as truth and noise together. How long noise alone would be is known; what is left is truth
(James and Stein, 1961).
"""

from __future__ import annotations

import torch
from torch import Tensor

from silodp.core.numbers import Number

CAUTION = 1.25
"""Factor of the noise's variance, unless the order gives another. 1 is right where columns are
unrelated. Where they go together, the steps draw noise back more slowly.
"""
LEAST = 0.02
"""Of the slopes, at least so much is kept: a model of noise alone says nearly one thing to all."""


class NoiseInSlopes:
    """The variance of a slope, and of its sum over some rounds, after heavy-ball momentum on noise,
    where the gradient grows by `curvature` (J,) with the slope.
    """

    def __init__(self, curvature: Tensor) -> None:
        self._curvature = curvature
        self._covariance = curvature.new_zeros(len(curvature), 3, 3)
        """Of the slope, the slope of the round before, and the sum."""
        self._summed = 0

    def add(self, deviation: Tensor, step: Number, momentum: Number, *, summed: bool) -> None:
        """Take one more round, with noise of this standard deviation (J, 1) in the gradient. If
        `summed`, its slope is added to the sum.
        """
        step = torch.as_tensor(step).to(deviation).flatten()
        momentum = torch.as_tensor(momentum).to(deviation).flatten()
        runs = len(self._curvature)
        noise = (step * deviation[:runs, 0]).expand(runs)
        move = self._covariance.new_zeros(len(noise), 3, 3)
        move[:, 0, 0] = 1 + momentum - step * self._curvature
        move[:, 0, 1] = -momentum
        move[:, 1, 0] = 1
        move[:, 2, 2] = 1
        entering = torch.stack([noise, 0 * noise, 0 * noise], 1)
        if summed:
            move[:, 2] += move[:, 0]
            entering[:, 2] = noise
            self._summed += 1
        self._covariance = move @ self._covariance @ move.mT
        self._covariance += entering[:, :, None] * entering[:, None]

    def kept(self, slopes: Tensor, caution: Number) -> Tensor:
        """Return (J, 1): the factor of these slopes (J, k) with which they are likely to be true.
        They are the mean over the rounds that were summed, or those of the last round if none was.
        `caution` is a factor of the variance.
        """
        variance = self._covariance[:, 0, 0]
        if self._summed:
            variance = self._covariance[:, 2, 2] / self._summed**2
        total = slopes.square().mean(1).clamp_min(1e-12)
        caution = torch.as_tensor(caution).to(total).flatten()
        return (1 - caution * variance / total).clamp(LEAST, 1.0).round(decimals=6)[:, None]
