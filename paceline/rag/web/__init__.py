"""The web: searching it, and fetching pages whose addresses strangers have chosen.

search  the protocol of search providers, and one of them
fetch   one page
"""
