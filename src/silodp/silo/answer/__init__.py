"""From a query to a private answer: clipped sums of records, and noise."""
