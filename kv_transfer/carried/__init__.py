"""KV by libraries that cannot prove their own quiet: each runs in a process of its own, the *carrier*.

Some libraries go on writing after a transfer was cancelled and its peer forgotten, and some end the process that is
read from when its reader dies. So neither pool is ever shown to them. At either end of a connection stands a carrier,
which shares a few staging *slots* with its worker, and moves bytes from slot to slot; the workers copy between slots
and pools themselves, through the gates that every transport has. What proves a block quiet is that nobody but us
touches it; a slot is proved quiet by the end of its carrier. The price is a copy at each end, and a process per
connection.

``carrier`` is a worker's hold on its carrier, ``child`` what runs there, with ``movers`` for each library; ``orders``
holds the bytes between the two and ``staging`` the slots. ``wire`` holds the bytes of the TCP connection beside,
``line`` and ``serving`` are the two sides' conversations on it, and ``sender`` and ``receiver`` face the caller.
``library`` tells which libraries there are.
"""
