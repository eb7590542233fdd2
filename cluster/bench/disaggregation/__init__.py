"""``kvferry bench disaggregation``: what it buys that prefill and decode are apart, against one engine that does both.

Real workers in processes of their own, each held to its cores, and routers in this one; nothing is simulated.
"""
