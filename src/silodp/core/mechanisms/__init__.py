"""How an answer is made private."""
