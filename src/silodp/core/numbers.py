"""What a hyper-parameter is, and how much rounding a clipped norm is allowed."""

from torch import Tensor

Number = float | Tensor
"""A hyper-parameter: one number, or one per run with shape (J, 1)."""

CLIP_TOLERANCE = 1e-5
"""Relative rounding error allowed to a clipped norm; every sensitivity is charged for clip x (1 + this)."""
