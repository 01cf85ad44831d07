"""The links of a pipeline whose stages are processes. Pure.

- `messages`: commands of the head, results of the stages, headers of bulk messages; their codec
- `sampling`: what is asked of rows, and what was sampled, as messages
- `rows`: hidden rows to bytes and back
- `pipe`: frames, bulk messages in chunks, credits
- `document`: their part of openapi/link.md
- `handshake`: how both ends of a connection prove their keys
"""
