"""The terminal client: talks to a server over HTTP alone. Needs neither a model nor torch.

commands      `paceline chat`, `verify`, `mcp`, `status` and `policy check`
dialogue      a conversation with its commands, and how an answer was written, as text
demo          `paceline demo`
conversation  requests to OpenAI's API and their streamed answers
"""
