"""From logits to tokens.

dist     next-token distributions, and the Gumbel noise common to both sides
sampler  sampling parameters, logits processors, top-k / top-p / min-p, and the definition of a row's token
"""
