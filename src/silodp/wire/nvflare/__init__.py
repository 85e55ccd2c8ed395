"""Over NVFlare."""
