"""The gate as a process: door, policy, daemon, pause, page."""
