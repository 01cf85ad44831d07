"""`/v1/chat/completions`.

request  the body, and from it to requests of generations
tools    calls of tools in the answer's text
output   the route, and encoders of the answer
"""
