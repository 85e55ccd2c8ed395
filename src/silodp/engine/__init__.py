"""Clipped sums of gradients, fast: torch, C and Triton."""
