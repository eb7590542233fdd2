"""``kvferry bench router``: what a router costs, with workers that have no model."""
