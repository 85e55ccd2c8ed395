"""Make ready models by name, for people who do not bring one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from silodp.core.errors import BadInput
from silodp.core.problem.additive import additive
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

    They are a linear layer. For ordered classes they are one score and a threshold for each step,
    so that all steps have the same odds ratios.
    """
    if task.kind != "ordinal":
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
