"""The terminal client: talks to a server over HTTP alone. Needs neither a model nor torch.

commands      `paceline chat`
status        `paceline status`
dialogue      a conversation with its commands
demo          `paceline demo`
conversation  requests to OpenAI's API and their streamed answers
"""
