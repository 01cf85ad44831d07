"""Pure algorithms on numpy and the standard library: no clock, socket, thread, global randomness or model inside.

sampling      next-token distributions, logits processors, the sampler and its noise
batching      segments, the scheduler, the block manager
drafting      drafts without a draft model, and how many draft tokens pay
verification  drafted chains against the target's distributions
offloading    how much a device drafts for a verifier elsewhere, within an energy budget
aggregation   DRAGON's weights and the aggregators
difficulty    whether a small model's answer will be as good as a larger one's
clock         what is expected of steps, links, peers and drafts, from what was measured
energy        joules of steps, messages and answers
policy        the owner's rules of documents, keys, models and budgets, and their decision
side          the names of the two sides, and who may ask a device
fair          turns and shares of owners, one rule at every door
addresses     addresses of senders, and strangers by them
words         the words of a text, for comparison
redaction     names and numbers replaced by placeholders, and put back
attached      documents in messages, told from what their user has written
printable     strangers' text for logs and terminals
"""
