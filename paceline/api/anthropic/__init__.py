"""Anthropic's Messages API, as a shape over chat completions.

`request`: to a chat body. `endpoint`: the routes. Not here: images, PDFs, Anthropic's own tools, thinking, batches.
"""
