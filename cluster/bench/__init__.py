"""``kvferry bench``: what the KV transports reach on this machine or between two, and where a request's time goes.

``case``, ``block_table``, ``statistics`` and ``report`` are pure; ``near_end`` and ``far_end`` are the two processes.
"""
