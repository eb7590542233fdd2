"""``kvferry bench attention``: the attention backends that run on this machine, beside each other and the roofline.

``case``, ``shape``, ``figures`` and the counting of ``roofline`` are pure.
"""
