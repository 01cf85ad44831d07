"""One ragged batch of many sequences.

segment        rows of one sequence in a forward pass; the batch
scheduler      which segments run next
pending        segments that wait, their groups, and how many rows of a prompt or an owner a step takes beside answers
block_manager  KV blocks, block tables, copy on write; blocks by their content; a sequence's rows outside the engine
"""
