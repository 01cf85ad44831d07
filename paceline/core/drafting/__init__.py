"""Drafts without a draft model.

ngram_drafter: drafts of one request from look-up tables and the suffix automaton
lookup_table: likely successors of tokens and bigrams
tree_search: best-first and static draft trees
acceptance: acceptance rates of drafts by rank
budget: the number of draft tokens per step
"""
