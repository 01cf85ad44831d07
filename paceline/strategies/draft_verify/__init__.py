"""`draft_verify` (GELATO): the device drafts with its own model, the cloud's model verifies.

- `machine`: the strategy's record
- `drafter`: the device's machine; `drafting`: how its chain grows; `chain`: what was drafted, sent and lost
- `pace`: how much a step drafts: the outer loop, the entropy gate and what both have learnt
- `target_writer`: the cloud's machine; `peer_chain`: its copy of the chain
- `verifiers`: how drafts are verified, both sides' halves
- `early_verdicts`: verdicts that came before those they follow
- `options`: the requests it can keep
"""
