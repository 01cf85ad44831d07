"""A model cut into spans of layers.

- `stage`: one span, from hidden rows to hidden rows
- `history`: what a lost stage must be told again
"""
