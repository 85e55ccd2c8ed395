"""LoRA (Hu et al. 2021): a frozen module whose linear layers each get a small trainable change, so
that far less has to be drowned in noise.
"""

from __future__ import annotations

import copy
import math

from torch import Tensor, nn

from silodp.core.errors import BadInput


class LowRank(nn.Module):
    """A frozen linear layer, plus b a with a (rank, in) random and b (out, rank) zero at the start:
    it starts as the layer that it was.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.b = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        nn.init.zeros_(self.b)

    @property
    def weight(self) -> Tensor:
        """As blocks of torch ask for it."""
        return self.layer.weight + self.b @ self.a

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def lora(module: nn.Module, rank: int) -> nn.Module:
    """A copy of `module` in which nothing is trained but a change of this rank in each nn.Linear;
    put a trainable head behind it.
    """
    if rank < 1:
        raise BadInput(f"the rank is {rank}; it must be 1 or more")
    module = copy.deepcopy(module).requires_grad_(False)
    layers = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not layers:
        raise BadInput("the module has no nn.Linear inside; LoRA changes linear layers alone")
    for parent, name, child in layers:
        setattr(parent, name, LowRank(child, rank))
    return module
