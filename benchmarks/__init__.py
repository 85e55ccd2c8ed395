"""silodp against its peers: `python -m benchmarks` prints one table."""
