"""Paceline: a device and a cloud write one answer together.

core              sampling, batching, drafting, aggregation and timing, as pure functions and data
wire              messages of the link between device and cloud, their encoding, and the link's state machine
strategies        ways for one or two sides to write one answer, as machines without I/O
workflow          scheduling of a workflow of agents over all processing units
engine            models behind one interface: Hugging Face, paged KV cache, stages, the reader, fake; tokenizers;
                  grammars
encoder           the encoder of all-MiniLM-L6-v2, for the embedder and the reader
rag               documents: parsing, chunks, embeddings, indexes, stores, prompts, document KV
runtime           a node that runs strategies on an engine: engine thread, sessions, links, look-up tables, workflows
api               the HTTP API over `runtime.service.Service`: OpenAI's, Anthropic's and Ollama's shapes, and the web
                  page
hub               models of the Hugging Face hub and on this machine
models            the demonstration's models and its documents
model_opening     the models that settings name, opened
commands          the command `paceline`
bootstrap         start-up of the server and the agent: opens models and stores, serves until a signal
settings          flags, variables and `paceline.toml` as one frozen object: the schema
settings_tables   the tables of that file: answers, energy, tuning and units
settings_sources  where settings come from, and which wins
sealing           encryption at rest
secret_files      private folders and files; secrets that people pass in
sql               what stores ask of their database; private SQLite files with a write-ahead log
postgres          a PostgreSQL database that several servers share
fleet             the servers that share it: who is alive, which devices are linked where, what has changed
system            users, locks, cores and signals of this operating system
errors            every error raised on purpose
"""

__version__ = "0.1.0"
