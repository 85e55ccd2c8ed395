"""PURE: arithmetic on what it is given; no I/O, no clock, no global random state."""
