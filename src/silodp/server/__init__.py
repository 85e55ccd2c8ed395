"""PUBLIC: sees releases only."""
