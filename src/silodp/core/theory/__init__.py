"""Evaluate the paper's theorems as functions: prescribed settings and bounds."""
