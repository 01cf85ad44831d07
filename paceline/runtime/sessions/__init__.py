"""One answer on one side: strategy, prompts, machine, text and report.

routing       the choice of a strategy
prompts       retrieval and the prompts of the branches
driver        execution of a machine's effects through `Ports`; bytes sent, and what happened when
base          the session of a machine on a real engine, link and clock, with masks computed beside the event loop;
              `PeerSession` for a peer's client
client        the session that faces a client
handoff       whether a device that has begun by itself goes on, and what came of earlier ones
output_text   tokens to final text and logprobs
prepared      a request that is ready to be written, and what is kept of its answer
remote        passages and texts that one side asks of the other
"""
