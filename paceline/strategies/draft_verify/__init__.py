"""`draft_verify` (GELATO): the device drafts with its own model, the cloud's model verifies.

machine        the strategy's record, and the device's machine
drafting       how its chain grows
pace           how much a step drafts: the outer loop, the entropy gate and what both have learnt
target_writer  the cloud's machine
verifiers      how drafts are verified: the requests each can keep, both sides' halves
"""
