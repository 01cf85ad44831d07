"""Parts that the machines of several strategies share.

branch_decoder  this side's branches as sequences on the engine, one forward each along the tree, and their mixture
prefix_tree     the tree of continuations that one side knows of, and what the drafter of an answer has yet to read
table_drafts    drafts from look-up tables, as many as pay, and what they learn from the rows
"""
