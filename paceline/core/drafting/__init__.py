"""Drafts without a draft model.

ngram_drafter: drafts of one request from look-up tables and the suffix automaton
lookup_table: likely successors of tokens and bigrams
suffix_automaton: the longest suffix of a text that occurred before
token_tree: draft trees and their verification
tree_search: best-first and static draft trees
acceptance: acceptance rates of drafts by rank
budget: the number of draft tokens per step
guard: whether requests draft at all, by whole steps
online_stats: statistics kept from one request to the next
"""
