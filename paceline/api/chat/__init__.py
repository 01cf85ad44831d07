"""`/v1/chat/completions`.

endpoint  the route
schema    the request body
request   from the body to requests of generations
tools     tools and response format
output    encoders of the answer
"""
