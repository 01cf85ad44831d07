"""How drafts are verified (`core.verification`): one interface, and both sides' halves of each verifier in one module.

- `base`: the interface
- `agreement`, `rejection`, `truncated`
- `choice`: the verifier of an answer
"""
