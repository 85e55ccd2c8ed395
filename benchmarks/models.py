"""The models of the table, each with a maker of random records for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silodp.engine.model import MeanPool, Residual, SelfAttention


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(50, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def cnn() -> nn.Module:
    """The paper's network for CIFAR-10."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def transformer(width: int = 64, heads: int = 4, blocks: int = 2) -> nn.Module:
    def block() -> list[nn.Module]:
        attention = [
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            SelfAttention(heads),
            nn.Linear(width, width),
        ]
        dense = [
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        ]
        return [Residual(*attention), Residual(*dense)]

    return nn.Sequential(
        nn.Embedding(1000, width),
        *(m for _ in range(blocks) for m in block()),
        MeanPool(),
        nn.Linear(width, 2),
    )


def vectors(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(silos, records, 50), torch.randint(2, (silos, records))


def images(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(silos, records, 3, 32, 32), torch.randint(10, (silos, records))


def texts(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (silos, records, 32)), torch.randint(2, (silos, records))


def _convolutions(*channels: int) -> list[nn.Module]:
    """3 x 3 convolutions with ReLU, 0 for a max-pooling of 2 x 2."""
    made, width = list[nn.Module](), 3
    for each in channels:
        made += [nn.Conv2d(width, each, 3, padding=1), nn.ReLU()] if each else [nn.MaxPool2d(2)]
        width = each or width
    return [*made, nn.Flatten()]


def small_vgg() -> nn.Module:
    """Convolutions of 32, 64 and 128, each with a pooling, and a hidden layer of 410: 937,448
    parameters.
    """
    return nn.Sequential(
        *_convolutions(32, 0, 64, 0, 128, 0), nn.Linear(2048, 410), nn.ReLU(), nn.Linear(410, 10)
    )


def vgg() -> nn.Module:
    """The eight convolutions of VGG-11 without its last pooling, and a hidden layer of 860:
    10,991,230 parameters.
    """
    layers = _convolutions(64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512)
    return nn.Sequential(*layers, nn.Linear(2048, 860), nn.ReLU(), nn.Linear(860, 10))
