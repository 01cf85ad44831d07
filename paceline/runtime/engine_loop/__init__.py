"""The thread that owns an engine.

worker            the thread and its queues
remote_worker     calls to a model's servers in its place
executor          segments to scheduled forward passes and answers, without the thread
requests          what callers ask for
document_prefill  document KV: lookup, prefill while idle, writing
"""
