"""Ready models by name, for people who do not bring their own."""

from __future__ import annotations

from torch import nn

from silodp.core.errors import BadInput
from silodp.core.losses import Loss, cross_entropy, logistic, squared_error


def model_by_name(text: str, features: int, classes: int) -> tuple[nn.Module, Loss]:
    """ "linear" (least squares; classes = 0), "logistic", or "mlp:H" with H hidden units, with the loss that belongs to the targets."""
    name, _, argument = text.partition(":")
    if name not in ("linear", "logistic", "mlp"):
        raise BadInput(f"model {text!r} is unknown; use linear, logistic or mlp:HIDDEN, such as mlp:16")
    if (name == "linear") != (classes == 0) and name != "mlp":
        raise BadInput(f"model {name} does not fit the label; use linear or mlp for numbers and logistic or mlp for classes")
    outputs, loss = (
        (1, squared_error) if classes == 0 else (1, logistic) if classes == 2 and name == "logistic" else (classes, cross_entropy)
    )
    if name != "mlp":
        return nn.Sequential(nn.Linear(features, outputs)), loss
    if not argument.isdigit() or int(argument) < 1:
        raise BadInput(f"model {text!r} needs a number of hidden units of 1 or more, such as mlp:16")
    return nn.Sequential(nn.Linear(features, int(argument)), nn.ReLU(), nn.Linear(int(argument), outputs)), loss


def lenet(channels: int, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling, for images (channels, 32, 32): 62,006 parameters for 3 channels and 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )
