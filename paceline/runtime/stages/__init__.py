"""A pipeline whose stages are processes.

- `connecting`: dialling and accepting, with the handshake
"""
