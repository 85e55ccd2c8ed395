"""Accounting: what releases cost, rules that add it up, conversions."""
