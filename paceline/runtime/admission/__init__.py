"""From a request to its answer's sessions.

- `answers`: a place for each answer, its first session, and the next one where it is written in stretches
- `stretches`: an answer of several sessions, which its client sees as one
"""
