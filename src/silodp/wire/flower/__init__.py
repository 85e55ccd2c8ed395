"""Over Flower."""
