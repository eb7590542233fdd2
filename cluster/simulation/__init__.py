"""``kvferry simulate``: a cluster of any size on a clock of its own, with the router's own placement.

What decides is the router's code as it is: registry, placer, policy, forecast, block index, feeds, breakers. Workers
and links are models: queues, pools and times, no tokens. Nothing here does I/O but ``command``.
"""
