"""How much a device drafts for a verifier elsewhere, under an energy budget (GELATO).

- `workload`: floating-point operations, seconds and joules of drafting and sending
- `draft_length`: the outer loop: a Lyapunov queue of energy, and the number of drafts with the most utility
- `entropy_gate`: the inner loop: stop drafting where the draft model is unsure
- `estimates`: what both loops know of acceptance, payload and times, learnt from each step
"""
