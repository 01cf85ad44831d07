"""`/v1/files` and `/v1/vector_stores`."""
