"""The OpenAI-compatible HTTP front: parsing, detokenising, stop strings, answers; it knows no worker."""
