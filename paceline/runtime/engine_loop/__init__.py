"""The thread that owns an engine: scheduling, execution, stored prefixes, timing."""
