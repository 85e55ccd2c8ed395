"""What crosses the boundary, as bytes: frames, queries, cards, sealed boxes, quotes."""
