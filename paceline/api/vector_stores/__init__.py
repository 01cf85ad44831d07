"""`/v1/files` and `/v1/vector_stores`.

`files`, `endpoint`: their routes. `search`: filters and ranking, and the stores that an answer reads.
"""
