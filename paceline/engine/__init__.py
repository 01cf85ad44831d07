"""Runs transformers: the engine contract (`contract`), its implementations, and the tokenizer."""
