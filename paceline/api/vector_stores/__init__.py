"""`/v1/files` and `/v1/vector_stores`.

`files`, `endpoint`: their routes. `upload_turns`: shares of owners whose uploads arrive at once. `schema`: bodies and
answers of `/v1/vector_stores`. `search`: filters and ranking, and the stores that an answer reads.
"""
