"""What `paceline demo` consists of.

local_pair   a server and an agent on this machine
questions    asked, shown and judged
"""
