"""`pipeline`: continuous tree speculation on an engine with several forwards under way (FlowSpec).

machine: verification, pruning and sending; the strategy's record
growth: drafts for the tree, from look-up tables or a draft model
model_drafter: drafts from a model on an engine of its own
segments: segments of the tree as forwards, and their rows once they are answered
options: options, of which baselines and ablations are settings
"""
