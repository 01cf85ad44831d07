"""Asyncio, threads and clocks: runs strategies' machines on engines and links.

service        the protocol that the HTTP surface uses
node           one side of the program, its implementation
served_models  several models behind one service
admission      places of answers, and answers written in stretches
questions      parts of a question, and whether documents answer them
policy         what the owner's rules make of a request, and what is kept of them
reading        what is found out and read of a request
preparation    from a request to a session that is ready to run
proof          an answer computed again, and held against what was told
resources      engine, tokenizer, documents, n-gram tables, grammars and statistics of a side; what a node is made of
sessions       one answer on one side
engine_loop    the thread that owns an engine
stages         a model whose layers are spread over processes
units          processing units: lanes of the engine, threads, the link; work in turns of its owners
workflows      workflows of agents, served
endpoint       a stranger's endpoint over HTTP
outside        answers and agents' texts that it writes
lookup_tables  n-gram tables on disk
peers          links of a node and the sessions that peers open
link           connections between device and cloud
identity       keys and their signatures
asking         what a cloud may ask a device, and the log of it
energy         meters of this machine, and the budget
stimuli        the log of what machines are told and answer
tracing        spans of OpenTelemetry
"""
