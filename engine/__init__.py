"""The engine of one worker: a paged KV cache, who holds which block of it, and the forward pass over it.

The parts are imported by their own names (``engine.runner``, ``engine.block_pool`` and so on), so that the bookkeeping
loads without torch.
"""
