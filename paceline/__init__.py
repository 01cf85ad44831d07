"""Paceline: a device and a cloud write one answer together.

core        sampling, batching, drafting, aggregation and timing, as pure functions and data
wire        messages of the link between device and cloud, their encoding, and the link's state machine
strategies  autoregressive, lookup_tree and aggregate decoding as machines without I/O
engine      models behind one interface: Hugging Face, paged KV cache, fake; tokenizers; grammars
rag         documents: parsing, chunks, embeddings, indexes, stores, prompts, document KV
runtime     a node that runs strategies on an engine: engine thread, sessions, links, look-up tables, simulator
api         OpenAI's HTTP API over `runtime.service.Service`
models      the demonstration pair, its documents, and its training
commands    the command `paceline`
bootstrap   start-up of the server and the agent: opens models and stores, serves until a signal
settings    flags, `PACELINE_*` variables and `paceline.toml`, resolved to one frozen object
sqlite      private SQLite files with a write-ahead log
errors      every error raised on purpose
"""

__version__ = "0.1.0"
