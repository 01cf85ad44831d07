"""Services of a node for texts that it does not answer.

node_texts   these methods of `Service`
embeddings   vectors
reranking    relevance of passages to a query
"""
