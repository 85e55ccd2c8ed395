"""A silo's records: reading, checking and splitting them."""
