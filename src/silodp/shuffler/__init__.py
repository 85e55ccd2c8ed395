"""TRUSTED NOT TO REVEAL COUNTS: opens silos' boxes, adds their counts and passes on totals.

It sees counts under each silo's own noise, and no record.
"""
