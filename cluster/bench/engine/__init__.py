"""The engine as the workers drive it, against the machine's roofline and, step by step in turn, other engines.

``steppers`` runs in a rival's interpreter, the rest in ours.
"""
