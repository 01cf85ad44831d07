"""Attention over the paged KV cache, behind one seam.

- `interface`: what transformers calls, and what a forward's metadata must do.
- `backends`: which of those below serves a device, a number format and head sizes.
- `blocks`: blocks where they are, by the kernel in C. A CPU's.
- `gathered`: blocks copied side by side, masks over all columns. A CPU's without a compiler, and the reference.
- `tiled`: kernels that read the blocks where they are. `tile_plan`: what they read, as integers. `triton_kernels`: for
  a GPU. `torch_kernels`: their twin for the CPU, for tests.
"""
