"""A model that runs behind HTTP servers, token-in and token-out: vLLM's, and others as far as theirs suffice.

servers  the servers of one model: what they can do, calls to them, and which is asked when one is lost
rows     tokens of rows of which a server tells only the likeliest ids

How the operations of the contract (`engine.base`) map, with `runtime.engine_loop.remote_worker` as the loop:

forward                       each wanted row is a prompt of its own, all of a segment in one call that generates one
                              token each; the server's prefix cache holds what they share
a row's distribution          its 20 likeliest ids; further ids are asked for by name where the common noise lifts them,
                              by a second call that is counted. As a whole only approximately, and the answer says so
sample                        the reference's token, proven from those ids; where filters reach beyond them, or the
                              repetition penalty needs logits, the server's own draw: of the same distribution
a plain answer                one stream; above temperature 0 its tokens are the server's draws, seeded likewise
fork, prune, truncate         on lists of tokens here: no row of the server's is changed
begin, cached prefixes        the server's prefix cache, salted with the owner as ours is
export_kv, import_kv          not available: the server keeps its rows
free_rows, block_size         the server admits and preempts by itself; 1 row a block
constraints                   by our masks, a call a token; the server's `structured_outputs` are not used
"""
