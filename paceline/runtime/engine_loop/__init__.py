"""The thread that owns an engine.

- `worker`: the thread and its queues
- `executor`: segments to scheduled forward passes and answers, without the thread
- `requests`: what callers ask for
- `answers`: what they get: tokens sampled in one pass of a step, or distributions
- `in_flight`: batches under way
- `engine_memory`: memory of the engine as the scheduler uses it
- `sequence_records`: what each sequence holds, to compute it again after a preemption
- `memory`: KV rows that an answer may need
- `prefix_reuse`: import and export of stored prefixes
- `document_prefill`: document KV: lookup, prefill while idle, writing
- `calibration`: forward times measured at start
"""
