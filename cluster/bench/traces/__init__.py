"""Traces: which requests come when, how long each is, and what its prompt shares with others'. Pure, by a seed."""
