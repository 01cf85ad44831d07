"""The thread that owns an engine.

worker            the thread and its queues
executor          segments to scheduled forward passes and answers, without the thread
requests          what callers ask for
memory            KV rows that an answer may need
document_prefill  document KV: lookup, prefill while idle, writing
"""
