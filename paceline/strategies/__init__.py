"""Strategies: ways for one or two sides to write one answer, each a pure machine.

base            events, effects and configuration of machines; the record `Strategy`, all that the program around one
                reads
registry        strategies by name
solo            one side, one token a forward (`autoregressive`); what strategies of one side share
drafting        drafts of what one side writes, from tables and from a draft model, and machines that wait for them
lookup_tree     one side, verifying a draft tree in one forward (DIAA)
pipeline        one side, whose draft tree flows through an engine of several stages (FlowSpec)
joint           both sides; what their machines do at each event, whatever they decide by and draft, and when an answer
                goes on without its peer
draft_verify    the device drafts, the cloud's model verifies (GELATO)
aggregate       both sides, mixing their distributions token by token (DRAGON)
proof           the tokens that an answer owes after those that are known, computed again
decoding        sequences on the engine and the tree of prefixes, shared by all strategies
"""
