"""Sampling on the model's device, for engines on torch.

sampler        logits of a segment that stay on the device, and the answers to `Engine.sample`: single rows, and rows of
               several branches, mixed
batch_sampler  the token of every row in one pass: greedy, top-k, and by the open samplers all others
row_kernel     all but top-k on a CPU, and heads, in C (`row_kernel.c`), where the installation has built it
open_sampler   rows without top-k, by the noise's bounds; top-p and min-p
noise          the common noise as tensors
workspace      buffers that are kept between calls
"""
