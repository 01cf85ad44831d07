"""Sampling where the logits are: in tensors on the model's device, or in arrays of numpy.

host_rows      logits in arrays, and the answers to `Engine.sample` from them, without torch
sampler        logits in tensors that stay on the device, and the answers to `Engine.sample` from them: single rows, and
               rows of several branches, mixed
batch_sampler  the token of every row in one pass: greedy, top-k, and by the open samplers all others
row_kernel     all but top-k on a CPU, and heads, in C (`row_kernel.c`), where the installation has built it
open_sampler   rows without top-k, by the noise's bounds; top-p and min-p
noise          the common noise as tensors
workspace      buffers that are kept between calls
"""
