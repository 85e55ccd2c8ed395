"""A silo's budget and what was spent of it, in memory or durably."""
