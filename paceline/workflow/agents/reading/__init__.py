"""Reading of what models write, by any agent.

- `text`, `items`, `lines`: lines out of pieces of text, and what is left of one without bullets and quotes
- `vocabulary`: whether what a model wrote has to do with what it read
- `citations`: numbers in brackets
"""
