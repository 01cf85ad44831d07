"""One answer on one side: strategy, prompts, machine, text and report.

- `routing`: the choice of a strategy
- `prompts`: retrieval and the prompts of the branches
- `relevance_scales`: whether scores of two sides' documents can be compared
- `driver`: execution of a machine's effects through `Ports`
- `base`: the session of a machine on a real engine, link and clock; `PeerSession` for a peer's client
- `draft_model`: its sequences on the draft model's engine
- `client`: the session that faces a client
- `output_text`: tokens to final text and logprobs
- `prompt_logprobs`: log-probabilities of prompt tokens
- `remote_search`: passages of the cloud for an answer the device writes alone
- `remote_text`: texts of agents of a device's workflow that the cloud's model writes
- `egress`: bytes sent to the peer
"""
