"""Define what a hyper-parameter is, and how much rounding a clipped norm is allowed.

A ledger prices without torch, so this module does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from torch import Tensor

Number = Union[float, "Tensor"]
"""A hyper-parameter: one number, or one per run with shape (J, 1)."""

CLIP_TOLERANCE = 1e-5
"""The relative rounding error that a clipped norm may have.

Every sensitivity is charged for clip x (1 + this).
"""
