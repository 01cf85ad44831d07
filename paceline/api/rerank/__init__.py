"""`/v1/rerank`: documents of a request in the order of their relevance to its query."""
