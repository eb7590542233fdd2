"""The decode leg: room is reserved, the KV arrives under a grant, and generation goes on from there."""
