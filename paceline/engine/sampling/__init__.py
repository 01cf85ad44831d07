"""Sampling where the logits are: in tensors on the model's device, or in arrays of numpy.

row_kernel     logits in arrays, without torch: all but top-k, and heads, in C (`row_kernel.c`), where the installation
               has built it
sampler        logits in tensors that stay on the device, and the answers to `Engine.sample` from them: single rows, and
               rows of several branches, mixed
batch_sampler  the token of every row in one pass: greedy, top-k, and by the open sampler all others
open_sampler   rows without top-k, by the noise's bounds; top-p and min-p; the common noise as tensors
workspace      buffers that are kept between calls, and what else samplers share
"""
