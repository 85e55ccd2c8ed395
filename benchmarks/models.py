"""The models of the table, each with a maker of random records for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silodp.engine.blocks import MeanPool, Residual, SelfAttention


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(50, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def cnn() -> nn.Module:
    """The paper's network for CIFAR-10."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def transformer(width: int = 64, heads: int = 4, blocks: int = 2) -> nn.Module:
    def block() -> list[nn.Module]:
        attention = [nn.LayerNorm(width), nn.Linear(width, 3 * width), SelfAttention(heads), nn.Linear(width, width)]
        dense = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        return [Residual(*attention), Residual(*dense)]

    return nn.Sequential(nn.Embedding(1000, width), *(m for _ in range(blocks) for m in block()), MeanPool(), nn.Linear(width, 2))


def vectors(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(silos, records, 50), torch.randint(2, (silos, records))


def images(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(silos, records, 3, 32, 32), torch.randint(10, (silos, records))


def texts(silos: int, records: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (silos, records, 32)), torch.randint(2, (silos, records))
