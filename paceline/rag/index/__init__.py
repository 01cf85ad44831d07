"""Finding passages: dense vectors (FAISS), BM25, and the two fused."""
