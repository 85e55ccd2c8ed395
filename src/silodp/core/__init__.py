"""PURE: arithmetic on arguments, without I/O, clock or global random state."""
