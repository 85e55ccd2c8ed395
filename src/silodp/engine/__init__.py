"""Compute clipped sums of gradients fast, in torch, C and Triton."""
