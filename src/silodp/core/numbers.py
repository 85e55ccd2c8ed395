"""Define what a hyper-parameter is, and how much rounding a clipped norm is allowed."""

from torch import Tensor

from silodp.core.tolerance import CLIP_TOLERANCE as CLIP_TOLERANCE

Number = float | Tensor
"""A hyper-parameter: one number, or one per run with shape (J, 1)."""
