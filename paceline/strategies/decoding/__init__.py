"""Parts that the machines of all strategies share.

branch_decoder: this side's branches as sequences on the engine, one forward each along the tree
rescoring: the rows of all branches to one distribution: constraint, penalties, document scores, mixture
prefix_tree: the tree of continuations that one side knows of
drafter_feed: what the drafter of one answer has yet to read and to learn
"""
