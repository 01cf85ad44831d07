"""One ragged batch of many sequences.

segment: rows of one sequence in a forward pass; the batch
placed_segment: the same as an engine runs it, once its sequence is known
scheduler: which segments run next
owner_limits: how many rows of one owner a step takes while others have answers in it
pace: times of steps, and how many rows of long prompts a step takes beside answers by them
admission: which of them have memory for their rows; preemption
row_accounts: whose rows may be taken for whom, in one step
groups: sequences that belong together, and their order
pending: segments that wait, and rows that are to be computed again
memory: what the scheduler asks of the engine's memory
block_manager: KV blocks, block tables, copy on write
prefix_cache, block_registry: names of blocks by content, by which sequences that begin alike share them
kv_prefix: keys and values of a sequence's first rows, outside any engine
"""
