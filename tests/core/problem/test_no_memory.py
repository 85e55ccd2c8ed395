"""A model and a loss that keep something of the records that they have seen are refused on made-up
records, before any gate serves them.
"""

import contextlib

import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.problem.trial import made_up, targets, try_loss, try_model


class Largest(nn.Module):
    """Scales by the largest value so far, wherever it can be read."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(3, 1), start

    def forward(self, x):
        with contextlib.suppress(Exception):
            self.most = max(self.most, float(x.abs().max()))
        return self.layer(x) / self.most


class Least(Largest):
    """Takes away the least value so far, which made-up records between 0 and 1 never reach."""

    def forward(self, x):
        with contextlib.suppress(Exception):
            self.most = min(self.most, float(x.min()))
        return self.layer(x - self.most)


class LargestLoss:
    """The same as `Largest`, of a loss."""

    def __init__(self, start: float) -> None:
        self.most = start

    def __call__(self, output, target):
        with contextlib.suppress(Exception):
            self.most = max(self.most, float(output.abs().max()))
        return logistic(output / self.most, target)


class LeastLoss(LargestLoss):
    """The same as `Least`, of a loss."""

    def __call__(self, output, target):
        with contextlib.suppress(Exception):
            self.most = min(self.most, float(output.min()))
        return logistic(output - self.most, target)


@pytest.mark.parametrize("model", [Largest(1.0), Largest(1e5), Largest(1e12), Least(0.0)])
def test_a_model_that_remembers_records_is_refused_on_made_up_ones(model):
    x = made_up(3, 3)
    with pytest.raises(BadInput, match="remembers records"):
        try_model(Problem(model, logistic), x, "the model")
    try_model(Problem(nn.Linear(3, 1), logistic), x, "the model")


@pytest.mark.parametrize("loss", [LargestLoss(100.0), LeastLoss(-1e5)])
def test_a_loss_that_remembers_records_is_refused_on_made_up_ones(loss):
    x, y = made_up(3, 3), targets(Task.plain(2), torch.float32)
    with pytest.raises(BadInput, match="remembers records"):
        try_loss(Problem(nn.Linear(3, 1), loss), x, y, "the loss")
    try_loss(Problem(nn.Linear(3, 1), logistic), x, y, "the loss")
