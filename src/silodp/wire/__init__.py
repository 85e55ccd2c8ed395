"""PLUMBING: carries a query to a silo and the release back."""
