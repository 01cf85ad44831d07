"""Attention over the paged KV cache, behind one seam.

backends        `gathered`, and which way serves a device, a number format and head sizes
tile_plan       the seam, the integers that a step's programs read, and `tiled`
triton_kernels  the kernels of `tiled` on a GPU; on a CPU they are those of `engine.layer_kernel`
"""
