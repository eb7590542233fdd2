"""Moving KV blocks between two pools: the plan, the transports, and who may touch which block meanwhile.

This package sees memory regions and block ids, never a pool. Start from :mod:`kv_transfer.transport` (the contract and
the registry of transports) and :mod:`kv_transfer.plan` (which bytes go where).
"""
