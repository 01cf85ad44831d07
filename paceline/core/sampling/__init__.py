"""From logits to text.

dist: next-token distributions
sampler: sampling parameters, logits processors, top-k / top-p / min-p, the sampler
row: what an engine is asked for in place of a distribution, and the definition of its answer
row_tree: rows of which only those are sampled that the tokens lead to
row_head: the part of a row that a choice between two sides depends on
ranking: ids in the order in which the sampler prefers them
noise: Gumbel noise common to both sides
quantize: probabilities rounded to 16 bits
constraint: structured output, and masks over the vocabulary
text: incremental detokenization and stop strings
"""
