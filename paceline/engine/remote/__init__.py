"""A model that runs behind HTTP servers, token-in and token-out: vLLM's, and others as far as theirs suffice.

opening  the servers of one model at the start: whether they answer, and what they can do
servers  calls to them, and which is asked when one is lost
rows     tokens of rows of which a server tells only the likeliest ids

How the operations of the contract (`engine.base`) map, with `runtime.engine_loop.remote_worker` as the loop:

- `forward`: each wanted row is a prompt of its own, all of a segment in one call that generates one token each; the
  server's prefix cache holds what they share.
- A row's distribution: its 20 likeliest ids; further ids are asked for by name where the common noise lifts them, by a
  second call that is counted, and never beside others (`servers._Turns`). As a whole it is approximate, and the answer
  says so, as where the noise lifts more ids than are asked for.
- `sample`: the reference's token, proven from those ids. Where filters reach beyond them, or the repetition penalty
  needs logits, the server's own draw, of the same distribution: which of the two depends on no noise.
- A plain answer: one stream; above temperature 0 its tokens are the server's draws, by a seed made of ours.
- `prune`, `truncate`: on lists of tokens here; nothing is changed at a server.
- `begin`: the server's prefix cache, salted with the owner as ours is.
- `free_rows`, `block_size`: the server admits and preempts by itself.
- Not available: `export_kv`, `import_kv` and stages, since a server keeps its rows; its `structured_outputs` are not
  used, since our masks, a call a token, are those of every engine.
"""
