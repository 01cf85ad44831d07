"""Asyncio, threads and clocks: runs strategies' machines on engines and links.

- `service`: the protocol that the HTTP surface uses
- `node`: one side of the program, its implementation
- `admission`: places of answers, and answers written in stretches
- `preparation`: from a request to a session that is ready to run
- `peers`: links of a node and the sessions that peers open
- `resources`: engine, tokenizer, documents, n-gram tables, grammars and statistics of a side
- `sessions`: one answer on one side
- `engine_loop`: the thread that owns an engine
- `link`: connections between device and cloud
- `lookup_tables`: n-gram tables on disk
"""
