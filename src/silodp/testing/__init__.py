"""Public check_* suites, one per protocol; every implementation passes its own."""
