"""Drafts without a draft model.

ngram_drafter     drafts of one request from look-up tables and suffix automata
suffix_automaton  repetitions of a text, and the memory of earlier ones
lookup_table      likely successors of tokens and bigrams
tree_search       best-first draft trees, and the acceptance rates of drafts by rank that shape them
budget            the number of draft tokens per step
"""
