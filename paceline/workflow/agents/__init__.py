"""The agents of a workflow: what each is asked, and how what it writes is read while it writes (HeRo, 2603.01661).

- `records`: passages with the place they come from, and what agents make of them
- `reading`: lines, items and citations out of pieces of text
"""
