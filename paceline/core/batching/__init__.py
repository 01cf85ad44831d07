"""One ragged batch of many sequences.

segment: rows of one sequence in a forward pass; the batch
scheduler: which segments run next
pace: times of steps, and how many rows of long prompts a step takes beside answers by them
pending: segments that wait, and rows that are to be computed again
block_manager: KV blocks, block tables, copy on write
"""
