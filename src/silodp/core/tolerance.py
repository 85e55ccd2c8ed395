"""How much rounding a clipped norm is allowed: apart from what needs torch, since a ledger prices
by it without.
"""

CLIP_TOLERANCE = 1e-5
"""Relative rounding error allowed to a clipped norm; every sensitivity is charged for clip x (1 +
this).
"""
