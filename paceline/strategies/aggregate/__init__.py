"""`aggregate` (DRAGON): both sides read their own documents and write one answer.

machine: the `Strategy` record and the machine, which dispatches events to the roles and asks for forwards
state: the answer so far, and what holds with one peer
deciding: choose targets, send them, hand the decision over
following: append the peer's targets, take the decision over, send drafts
resync: send again what was lost; give up a peer that does nothing
exchange: draft trees to messages and back
tree_planner: which nodes to compute next
side_weights: how much each side counts
options: options, aggregator and limits of a request
stats: counts for the report
"""
