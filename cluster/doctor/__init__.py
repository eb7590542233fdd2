"""``kvferry doctor``: what of this machine, and of one cluster file, is as it must be, and how to mend what is not.

Each check gives one finding or several. What judges takes plain facts and touches nothing; what looks is thin. A check
that loads a library of others runs in a process of its own, so that one that crashes or hangs is a line too.
"""
