"""`/v1/completions`.

`endpoint`: the route. `request`: the request body, and its conversion to generations. `logprobs`: log-probabilities in
the older form. `output`: encoders of the answer.
"""
