"""Small private estimates beside training: scaling, scores, profile."""
