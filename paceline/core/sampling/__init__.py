"""From scores to a token: distributions, logits processors, the sampler and its noise, constraints, text of tokens.
Pure.
"""
