"""The head of a pipeline: an engine for everything above it.

- `pipeline`: the `AsyncEngine`; `far_rows`: scores that stay at the last stage
- `stage_head`: its thread: what is sent to the stages, and what comes; `under_way`: what it waits for
- `recovery`: what happens when a stage is lost, and when answers fail
- `members`: which stages there are, and which spans they have
- `local`: stages that the head starts itself
- `opening`: all of it, from the setting `stages`
"""
