"""Anthropic's Messages API, as a shape over chat completions.

request   a body to a chat body
endpoint  the routes, and events in Anthropic's form

Not here: images, PDFs, Anthropic's own tools, thinking, batches.
"""
