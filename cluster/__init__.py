"""Configuration, placement and supervision of a kvferry cluster, and the ``kvferry`` command.

The only package that imports ray, and it does so inside functions, so that the command starts quickly.
"""
