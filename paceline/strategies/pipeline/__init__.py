"""`pipeline`: continuous tree speculation on an engine with several forwards under way (FlowSpec).

machine   verification, pruning and sending; the strategy's record
growth    drafts for the tree, from look-up tables or a draft model
"""
