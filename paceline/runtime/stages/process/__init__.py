"""The process of a stage.

- `stage_server`: its head, its neighbours, and strangers at its port
- `stage_worker`: the thread that computes, which writes to an `outlet`
- `stage_changes`: changes of sequences there; `last_rows`: the scores of the last stage
"""
