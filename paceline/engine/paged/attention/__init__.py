"""Attention over the paged KV cache, behind one seam.

- `backends`: which of the two below serves a device, a number format and head sizes.
"""
