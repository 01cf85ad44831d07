"""`/v1/files` and `/v1/vector_stores`.

files     the routes of files
endpoint  the routes of vector stores
search    filters and ranking, and the stores that an answer reads
"""
