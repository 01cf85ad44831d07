"""The thread that owns an engine.

- `worker`: the thread and its queues
- `executor`: segments to scheduled forward passes and answers, without the thread
- `memory`: KV rows that an answer claims
- `prefix_reuse`: import and export of stored prefixes
- `document_prefill`: document KV: lookup, prefill while idle, writing
- `calibration`: forward times measured at start
"""
