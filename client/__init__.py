"""The terminal client: talks to a server over HTTP alone. Needs neither a model nor torch.

commands      `paceline chat`
conversation  requests to OpenAI's API and their streamed answers
screen        answers in the terminal, coloured by side
"""
