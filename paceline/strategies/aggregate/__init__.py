"""`aggregate` (DRAGON): both sides read their own documents and write one answer.

machine: the `Strategy` record and the machine, which dispatches events to the roles and asks for forwards
state: the answer so far, and what holds with one peer
tree_planner: which nodes to compute next
options: options, aggregator and limits of a request
"""
