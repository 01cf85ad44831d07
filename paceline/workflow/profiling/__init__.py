"""Profiles of operations on units: measured, and learnt.

`profiles`: seconds and bandwidth by shape. `contention`: samples of slowdown from overlaps. `learning`: profiles that
are refined as they are used. What they are fitted by is in `workflow/regression.py`.
"""
