"""A model cut into spans of layers.

- `stage`: one span, from hidden rows to hidden rows
- `measure`: the speed of a layer and of the head, from which spans are planned
- `sent`: sequences and memory of stages as of everything that was sent to them
- `history`: what a lost stage must be told again
"""
