"""Processing units of a node, through which all of its work passes.

- `registry`: lanes of the engine, threads of the host, the link
- `plain_work`: what no workflow asked for, on the same units
"""
