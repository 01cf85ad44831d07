"""DRAGON's aggregation of two sides' distributions.

exactness: tests whether a truncated distribution settles the token
weights: mixtures over documents and sides
"""
