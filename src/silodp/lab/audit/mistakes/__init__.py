"""Mistakes that the audit plants and must catch. Not in the wheel."""
