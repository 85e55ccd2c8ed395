"""Fits to the raw records of one silo, which never leave it."""
