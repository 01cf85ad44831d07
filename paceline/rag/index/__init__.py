"""Indexes over chunks, in memory.

bm25    word search and rank fusion
hybrid  vectors and both together, kept consistent with the rows
"""
