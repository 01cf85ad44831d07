"""Anthropic's Messages API, as a shape over chat completions.

`schema`: bodies. `request`: to a chat body. `content`: blocks of an answer. `output`: whole and streamed answers.
`errors`: their envelope. `endpoint`: the routes. Not here: images, PDFs, Anthropic's own tools, thinking, batches.
"""
