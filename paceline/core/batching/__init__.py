"""One ragged batch of many sequences: segments, the scheduler, KV blocks. Pure."""
