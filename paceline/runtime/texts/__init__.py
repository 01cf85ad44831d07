"""What a node does with texts besides answering.

node_texts   these methods of `Service`
embeddings   vectors
reranking    relevance of passages to a query
"""
