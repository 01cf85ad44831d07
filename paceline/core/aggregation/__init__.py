"""DRAGON's aggregation of two sides' distributions.

weights      mixtures over documents and sides
exactness    tests whether a truncated distribution settles the token
aggregators  from both sides' distributions to the target
"""
