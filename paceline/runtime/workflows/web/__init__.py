"""The web in workflows: searching it, reading pages, and a second look at what they said.

- `access`: what a node searches and how it reads pages; `places`: the same for one request, which counts what it sends
- `decisions`: what the agents `plan` and `look` decide
- `page`: one page, from its URL to passages that are reranked
- `research`: searches, pages and the second look of one workflow
"""
