"""Parts that the machines of all strategies share.

branch_decoder: this side's branches as sequences on the engine, one forward each along the tree
answered_rows: rows of the last forward, as distributions or as sampled tokens
rescoring: the rows of all branches to one distribution: constraint, penalties, document scores, mixture
prefix_tree: the tree of continuations that one side knows of
ngram_drafts: drafts of tables and the text for nodes of the tree, where no distribution is known yet
drafter_feed: what the drafter of one answer has yet to read and to learn
"""
