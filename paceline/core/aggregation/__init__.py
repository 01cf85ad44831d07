"""DRAGON's aggregation of two sides' distributions.

registry: the aggregators by name
aggregator: the interface, and what the sides exchange
mixture, coin, dragon: the three aggregators
exactness: tests whether a truncated distribution settles the token
head_exactness: the same for heads of both sides
own_dist: a side's own distribution, its head first
weights: mixtures over documents and sides
branches: tokens from the mixture of one side's documents
placement: which side should aggregate
"""
