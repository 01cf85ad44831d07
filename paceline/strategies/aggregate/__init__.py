"""`aggregate` (DRAGON): both sides read their own documents and write one answer.

machine       the `Strategy` record and the machine, which dispatches events to the roles and asks for forwards
roles         who decides the tokens, who follows, and how the two change
state         the answer so far, and what holds with one peer
tree_planner  which nodes to compute next
options       options, aggregator and limits of a request
"""
