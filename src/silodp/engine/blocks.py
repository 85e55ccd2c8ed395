"""Define building blocks of small transformers, without parameters.

The fast path of `structured` has complete rules for them. For example:

    Sequential(
        Embedding(V, D),
        Residual(LayerNorm(D), Linear(D, 3 * D), SelfAttention(4), Linear(D, D)),
        MeanPool(),
        Linear(D, 2),
    )
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput


class Residual(nn.Sequential):
    """x + body(x), where the body is the chain of the given modules."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input plus the body's output."""
        return input + super().forward(input)


class SelfAttention(nn.Module):
    """softmax(q k' / sqrt(D / heads)) v within each record.

    q, k and v are side by side in the input: (B, T, 3 D) becomes (B, T, D).
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise BadInput(f"heads is {heads}; use 1 or more")
        self.heads = heads

    def forward(self, input: Tensor) -> Tensor:
        """Return the attention (B, T, D).

        Raise BadInput if the heads do not divide the last axis.
        """
        if input.shape[-1] % (3 * self.heads):
            raise BadInput(
                f"the last axis has size {input.shape[-1]}; use a multiple of 3 x "
                f"{self.heads} heads, for q, k and v"
            )
        q, k, v = input.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Return what a definition contains of this module."""
        return f"{self.heads}"


class MeanPool(nn.Module):
    """The mean over a sequence: (B, T, D) to (B, D)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the mean over the sequence."""
        return input.mean(1)
