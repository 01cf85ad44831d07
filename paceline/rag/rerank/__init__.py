"""Reranking: the passages of a search scored again, each together with the query.

`reranker`: the protocol, loading by name. `late_interaction`: the default, over the token vectors of the embedder.
`cross_encoder`: any model of transformers that scores a pair of texts.
"""
