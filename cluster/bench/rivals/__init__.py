"""Other projects' work beside ours: ``program`` runs in the rival's interpreter with what it is given, as ``movers``.

``process`` is one running program, ``contest`` two of them for each rival, in step with the rounds of a case.
"""
