"""Attention over the paged KV cache, behind one seam.

- `interface`: what transformers calls, and what a forward's metadata must do.
- `backends`: which of the two below serves a device, a number format and head sizes.
- `gathered`: blocks copied side by side, masks over all columns. The CPU's, and the reference.
- `tiled`: kernels that read the blocks where they are. `tile_plan`: what they read, as integers. `triton_kernels`: for
  a GPU. `torch_kernels`: their twin for the CPU, for tests.
"""
