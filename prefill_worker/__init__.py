"""The prefill leg: prompts become KV blocks and a first token; the blocks leave under a lease."""
