"""Parts of the benches about two sides: replays, payload bytes, pairs of processes."""
