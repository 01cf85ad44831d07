"""Drafts without a draft model.

ngram_drafter  drafts of one request, as a best-first tree from look-up tables and suffix automata
lookup_table   likely successors of tokens and bigrams; repetitions of a text, and the memory of earlier ones
budget         the number of draft tokens per step
"""
