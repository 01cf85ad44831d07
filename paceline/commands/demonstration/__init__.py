"""Parts of `paceline demo`.

local_pair   a server and an agent on this machine
questions    asked, shown and judged
"""
