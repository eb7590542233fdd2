"""What two kvferry processes must agree on: ids, messages, codec, errors and the KV layout.

Nothing here imports torch, triton or ray; the Python client and the router start from this package alone.
"""
