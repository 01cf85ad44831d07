"""One ragged batch of many sequences.

segment: rows of one sequence in a forward pass; the batch
scheduler: which segments run next
block_manager: KV blocks, block tables, copy on write
prefix_cache: hashes of full blocks, by which sequences that begin alike share them
kv_prefix: keys and values of a sequence's first rows, outside any engine
"""
