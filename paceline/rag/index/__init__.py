"""Indexes over chunks.

`faiss_index`: nearest vectors, and the index file.
`bm25`: word search and rank fusion.
`hybrid`: both, kept consistent with the rows.
"""
