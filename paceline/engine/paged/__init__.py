"""The fast engine: transformers' modules with our attention, our KV cache and packed weights."""
