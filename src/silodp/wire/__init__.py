"""PLUMBING: carries a query out and a release back."""
