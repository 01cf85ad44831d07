"""Sampling on the model's device, for engines on torch.

- `device_logits`: logits of a segment that stay on the device, and the answers to `Engine.sample`.
- `batch_sampler`: the token of every row in one pass: greedy, top-k, and by the open samplers all others.
- `row_kernel`: all but top-k on a CPU, and heads, in C (`row_kernel.c`), where the installation has built it.
- `mixture_sampler`: rows of several branches, mixed and sampled.
- `head_sampler`: heads of mixed rows, for strategies that mix them with another side's.
- `open_sampler`: rows without top-k, by the noise's bounds; top-p and min-p. `host_open_sampler`: the same on a CPU
  without the kernel, where nothing waits for a copy, so that far less is read.
- `groups`: maxima and largest values of rows by groups of ids. `noise`: the common noise as tensors.
- `logits_processor`: constraint, penalties, bias, temperature. `margins`: what is left to the reference.
- `transfers`: between host and device, a step's results in one copy.
- `workspace`: buffers that are kept between calls.
"""
