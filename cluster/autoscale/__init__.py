"""How many workers of each role load and targets want, and what to do about the difference."""
