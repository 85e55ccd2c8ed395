"""Make ready models by name, for people who do not bring one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.problem.losses import Loss
from silodp.core.problem.task import Task


def model_by_name(
    text: str,
    features: int,
    task: int | Task,
    shape: tuple[int, ...] = (),
    numbers: Sequence[int] | None = None,
) -> tuple[nn.Module, Loss]:
    """Return the model that a text names, and the loss of the task.

    - "linear" is for numbers and counts, "logistic" for classes and survival times.
    - "additive:K" has curves of K knots.
    - "mlp:H" has H hidden units.
    - "cnn" is for images of `shape`.

    A number of classes stands for the plain task, where 0 is regression. `numbers` are the places
    of the features that are number columns, within [-1, 1]. Without a schema they are None, and all
    features are numbers. Raise BadInput for an unknown text, or a model that does not fit the task.
    """
    if isinstance(task, int):
        task = Task.plain(task)
    name, _, argument = text.partition(":")
    if name not in ("linear", "logistic", "additive", "mlp", "cnn"):
        raise BadInput(
            f"model {text!r} is unknown; use linear, logistic, additive:KNOTS, such as "
            "additive:8, mlp:HIDDEN, such as mlp:16, or cnn for images"
        )
    fits = {
        "linear": ("regression", "count"),
        "logistic": ("binary", "multiclass", "ordinal", "survival"),
    }
    if task.kind not in fits.get(name, (task.kind,)):
        raise BadInput(
            f"model {name} does not fit the label's task, {task.kind}; use linear, additive or "
            "mlp for numbers and counts, and logistic, additive or mlp for classes and survival "
            "times"
        )
    outputs, loss = task.head(one_logit=name in ("logistic", "additive"))
    if name == "additive":
        if shape:
            raise BadInput("model additive is for columns; use cnn or mlp:HIDDEN for images")
        shapes = additive(text, features, numbers)
        return nn.Sequential(shapes, *_last(shapes.width, outputs, task)), loss
    if name == "cnn":
        return cnn(shape, outputs), loss
    if name != "mlp":
        return nn.Sequential(*_last(features, outputs, task)), loss
    if not argument.isdigit() or int(argument) < 1:
        raise BadInput(
            f"model {text!r} needs a number of hidden units of 1 or more, such as mlp:16"
        )
    return nn.Sequential(
        nn.Linear(features, int(argument)), nn.ReLU(), *_last(int(argument), outputs, task)
    ), loss


def _last(features: int, outputs: int, task: Task) -> tuple[nn.Module, ...]:
    """Return the last layers.

    They are a linear layer. For ordered classes and survival times they are one score, and a
    threshold for each step or period. So all steps have the same odds ratios, and all periods the
    same ratios of hazards: one number for each feature, which less noise reaches.
    """
    if task.kind not in ("ordinal", "survival"):
        return (nn.Linear(features, outputs),)
    thresholds = nn.Linear(1, outputs)
    nn.init.ones_(thresholds.weight).requires_grad_(False)
    return nn.Linear(features, 1, bias=False), thresholds


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return two convolutions with ReLU and max-pooling, and a linear layer.

    It is for flattened images of `shape` (channels, height, width). Raise BadInput for smaller
    images than 4 x 4.
    """
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise BadInput(
            "model cnn needs images of 4 x 4 pixels or more; give a schema with a table "
            "[images], or use mlp:HIDDEN"
        )
    channels, height, width = shape
    return nn.Sequential(
        *(nn.Unflatten(1, shape), nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(16 * (height // 4) * (width // 4), outputs),
    )


def lenet(channels: int, classes: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max-pooling, for images (channels, 32, 32).

    It has 62,006 parameters for 3 channels and 10 classes.
    """
    return nn.Sequential(
        *(
            nn.Conv2d(channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


# --- additive models ------------------------------------------------------------------------------
#
# An additive model is a sum of one curve for each number column, and weights for the rest. A
# clinician can read such a model.
#
# A curve is piecewise linear over a column's public range, with K knots. There are K hat
# functions, each 1 at one knot and 0 at the others. A model with these as features would learn
# each of them from few records, under as much noise as everything else. So the curve has other
# coordinates, which are fixed and public. The first is the straight line, as in logistic
# regression. Then follow the bends in the order of their roughness, each smaller than the one
# before. So plain gradient descent with isotropic noise learns lines first and wiggles last, as a
# smoothing prior would.
#
# Six curves were tried, some of them bent and one with a jump, with 2,000 records and epsilon 1.
# The error was 19 per cent in these coordinates, 25 with the hat functions, 29 with one-hot bins
# and 26 for logistic regression. One-hot bins were worse up to 8,000 records at epsilon 8 too, so
# there is no word for them.

MOST = 64
"""The most knots of a curve."""


class Shapes(nn.Module):
    """The fixed basis, from features (..., f) to (..., (K - 1) x numbers + others).

    It has no parameters and treats each record alone. `numbers` are the places of the number
    columns. Their features are in [-reach, reach], and beyond that a curve continues as a constant.
    Other features are unchanged and follow after the curves. `mix` (K, K - 1) has the values at the
    knots for each coordinate of a curve.
    """

    mix: Tensor

    def __init__(self, features: int, numbers: Sequence[int], knots: int, reach: float) -> None:
        super().__init__()
        self.features = features
        self.numbers = tuple(numbers)
        self.reach = reach
        self.others = tuple(i for i in range(features) if i not in self.numbers)
        self.register_buffer("mix", torch.tensor(bends(knots)))

    @property
    def width(self) -> int:
        """Return the number of features that the basis makes."""
        return self.mix.shape[1] * len(self.numbers) + len(self.others)

    def forward(self, x: Tensor) -> Tensor:
        """Return the coordinates of all curves, and then the other features."""
        numbers = torch.as_tensor(self.numbers, dtype=torch.long, device=x.device)
        others = torch.as_tensor(self.others, dtype=torch.long, device=x.device)
        mix = self.mix.to(x)
        last = self.mix.shape[0] - 1
        inside = x.index_select(-1, numbers).clamp(-self.reach, self.reach)
        position = (inside / self.reach + 1) * (last / 2)  # in knots, from 0 to last
        knots = torch.arange(last + 1, device=x.device, dtype=x.dtype)
        hats = (1 - (position[..., None] - knots).abs()).clamp(min=0)
        return torch.cat([(hats @ mix).flatten(-2), x.index_select(-1, others)], -1)

    def extra_repr(self) -> str:
        """Return what a definition contains of this module."""
        return (
            f"features={self.features}, numbers={self.numbers}, knots={self.mix.shape[0]}, "
            f"reach={self.reach:g}"
        )

    def curves(self, weight: Tensor) -> Tensor:
        """Return the values of each curve at the knots, (..., numbers, K).

        `weight` (..., width) has the weights of one output.
        """
        of_curves = weight[..., : self.mix.shape[1] * len(self.numbers)]
        return of_curves.unflatten(-1, (len(self.numbers), -1)) @ self.mix.to(weight).T


@functools.cache
def bends(knots: int) -> tuple[tuple[float, ...], ...]:
    """Return (K, K - 1): the line through -1 and 1, then the bends of Demmler and Reinsch.

    The bends are orthogonal over the range, and the smoothest is first. Let c_j be the roughness
    (mean squared second difference) of bend j at unit size. Its scale is (c_1 / c_j)^(1/2), which
    falls as 1 / j^2. The smoothest bend is as large as the line. The numbers are rounded, so that
    they and their hash are the same on every machine.
    """
    between = np.eye(knots, k=1)
    ends = np.zeros(knots)
    ends[[0, -1]] = 1
    # the integrals of products of two hats over the range
    mass = (4 * np.eye(knots) - 2 * np.diag(ends) + between + between.T) / (6 * (knots - 1))
    second = np.diff(np.eye(knots), 2, axis=0)
    root = np.linalg.inv(np.linalg.cholesky(mass))
    rough, turned = np.linalg.eigh(root @ second.T @ second @ root.T)
    # The first two have no second difference: the constant, which is the bias, and the line.
    shapes = (root.T @ turned)[:, 2:]
    shapes *= np.sign(shapes[-1]) * np.sqrt(rough[2:3] / rough[2:] / 3)
    line = np.linspace(-1, 1, knots)[:, None]
    return tuple(map(tuple, np.round(np.hstack([line, shapes]), 5).tolist()))


def additive(text: str, features: int, numbers: Sequence[int] | None) -> Shapes:
    """Return the basis that "additive:K" or "additive:K:REACH" names.

    Without `numbers` all features are number columns, and are taken to be standardised, with reach
    3. Raise BadInput for another text.
    """
    _, *words = text.split(":")
    try:
        knots = int(words[0])
        if len(words) == 2:
            reach = float(words[1])
        elif numbers is None:
            reach = 3.0
        else:
            reach = 1.0
    except (ValueError, IndexError):
        knots = 0
        reach = 0.0
    if not (3 <= knots <= MOST and 0 < reach < 1e6 and len(words) <= 2):
        raise BadInput(
            f"model {text!r} needs a number of knots from 3 to {MOST}, such as additive:8. "
            "If features are not within [-1, 1], also give the largest size, such as additive:8:3"
        )
    if numbers is None:
        numbers = range(features)
    return Shapes(features, numbers, knots, reach)
