"""``kvferry bench serve``: load on any server that speaks OpenAI's API, and what it makes of it."""
