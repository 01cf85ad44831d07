"""Encryption at rest: sealing with AES-256-GCM, where the keys lie, and the seal of a folder's answers.

Knows nothing of rows, tables or files beyond their bytes; what is sealed is decided where it is written.
"""
