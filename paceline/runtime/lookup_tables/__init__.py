"""N-gram look-up tables that drafts are taken from.

store   tables in memory and on disk, one for each owner over a common base
warmup  filling the base table from dialogues
"""
