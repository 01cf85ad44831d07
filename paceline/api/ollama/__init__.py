"""Ollama's API, as a shape over chat completions, raw prompts and embeddings.

request   to the bodies of the OpenAI surface
endpoint  the routes, and answers in Ollama's form
"""
