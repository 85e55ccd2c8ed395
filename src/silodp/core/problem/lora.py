"""Add LoRA (Hu et al. 2021): small trainable changes to the linear layers of a frozen module.

Far fewer parameters are trained, so far less noise is needed.
"""

from __future__ import annotations

import copy
import math

from torch import Tensor, nn

from silodp.core.errors import BadInput


class LowRank(nn.Module):
    """A frozen linear layer, plus b a with a (rank, in) and b (out, rank).

    a starts random and b starts at zero, so the module starts as the original layer.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.b = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a and set b to zero."""
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        nn.init.zeros_(self.b)

    @property
    def weight(self) -> Tensor:
        """Return the changed weight, which some blocks of torch read directly."""
        return self.layer.weight + self.b @ self.a

    @property
    def bias(self) -> Tensor | None:
        """Return the layer's bias."""
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the change."""
        return self.layer(x) + x @ self.a.T @ self.b.T


def lora(module: nn.Module, rank: int) -> nn.Module:
    """Return a copy of `module` in which only a change of this rank in each nn.Linear is trained.

    Put a trainable head behind it. Raise BadInput for a rank below 1 and for a module without
    linear layers.
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
        raise BadInput(
            f"{type(module).__name__} has no nn.Linear inside; give LoRA a module with linear "
            "layers, which are all that it changes"
        )
    for parent, name, child in layers:
        setattr(parent, name, LowRank(child, rank))
    return module
