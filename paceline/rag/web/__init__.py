"""The web: searching it, and fetching pages whose addresses strangers have chosen.

`search`: the protocol of search providers. `searxng`: a SearXNG server; `store_search`: a public document store.
`urls` and `addresses`: which URLs and which addresses may be fetched. `body`: an answer's bytes within limits.
`resolver`: addresses of names. `fetch`: one page. `pages`: its text, through the parser of uploads, in passages.
"""
