"""One answer on one side: strategy, prompts, machine, text and report.

routing       the choice of a strategy
prompts       retrieval and the prompts of the branches
driver        execution of a machine's effects through `Ports`
base          the session of a machine on a real engine, link and clock; `PeerSession` for a peer's client
client        the session that faces a client
mask_threads  masks of constraints, computed beside the event loop
timeline      what happened when, for a client that asks for it
output_text   tokens to final text and logprobs
remote        passages and texts that one side asks of the other
"""
