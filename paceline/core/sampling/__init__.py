"""From logits to text.

dist: next-token distributions
sampler: sampling parameters, logits processors, top-k / top-p / min-p, the sampler
row: what an engine is asked for in place of a distribution, and the definition of its answer
noise: Gumbel noise common to both sides
text: incremental detokenization and stop strings
"""
