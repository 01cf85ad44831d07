"""The terminal client: talks to a server over HTTP alone. Needs neither a model nor torch.

commands      `paceline chat`, and `paceline status` in `status`; `options` they share
dialogue      a conversation with its commands
conversation  requests to OpenAI's API and their streamed answers
"""
