"""Quantised models of GGUF files on llama.cpp, without torch.

engine   the engine contract over streams of llama.cpp's KV cache
library  llama.cpp's C functions: a model, its streams, and rows that are computed in them
"""
