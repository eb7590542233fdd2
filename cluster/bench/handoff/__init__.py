"""``kvferry bench handoff``: from complete blocks at prefill to committed blocks at decode, with nothing computed.

Two processes with the books, shells, sockets and pools of the workers, and no model: ``prefill_side`` measures,
``decode_side`` is a second process of the same command, ``order`` is what the first tells the second, ``figures`` what
came out. Times are of the monotonic clock, which the processes of one host share.
"""
