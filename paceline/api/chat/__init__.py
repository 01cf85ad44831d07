"""`/v1/chat/completions`.

`endpoint`: the route. `schema`: the request body. `request`: from the body to requests of generations.
`messages`: from a conversation to the chat template's input. `tools`: tools and response format.
`tool_calls`: the parser of tool calls in an answer. `message_builder`: the message of one choice.
`output`: encoders of the answer.
"""
