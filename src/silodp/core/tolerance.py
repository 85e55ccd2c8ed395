"""Define how much rounding a clipped norm is allowed.

It is in a separate file, because a ledger prices by it without loading torch.
"""

CLIP_TOLERANCE = 1e-5
"""The relative rounding error that a clipped norm may have.

Every sensitivity is charged for clip x (1 + this).
"""
