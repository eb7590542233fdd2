"""How many workers a load needs, on paper: a roofline for the steps, a queue for the prompts, and nothing measured."""
