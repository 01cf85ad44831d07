"""Limits on what one client may cost others.

`timeouts`: connections with a limit on the head. `doors`: pools of open and authenticated requests. `admission`: checks
before routing. `addresses`: the address that a connection is counted under.
"""
