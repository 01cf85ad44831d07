"""A pipeline whose stages are processes.

- `channel`: one TLS connection, driving `wire.stages.pipe`
- `connecting`: dialling and accepting, with the handshake
- `stage_kv`: KV prefixes as bulk messages
- `head`: the server's end: an `AsyncEngine` on stages elsewhere
- `process`: the end of a stage: its connections, and the thread that computes
"""
