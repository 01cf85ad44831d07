"""Ollama's API, as a shape over chat completions, raw prompts and embeddings.

`schema`: bodies. `request`: to the bodies of the OpenAI surface. `output`: lines and whole answers. `errors`: their
envelope. `generating`, `listing`, `embedding`: the routes. Not here: pulling, making and deleting models, images,
infilling, templates of the client.
"""
