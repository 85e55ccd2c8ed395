"""An open leaderboard of private federated learning, on tables with real silos."""
