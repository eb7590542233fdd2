"""Other projects' transfers on the same work: ``program`` runs in the rival's interpreter, the rest in ours.

``process`` is one running program, ``contest`` two of them for each rival, in step with the rounds of a case.
"""
