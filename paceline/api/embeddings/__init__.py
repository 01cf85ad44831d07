"""`/v1/embeddings`.

`endpoint`: the route. `openai_ids`: from OpenAI's token ids to text.
"""
