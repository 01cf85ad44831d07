"""HTTP below the endpoints.

`server`: uvicorn with a drain. `auth`: keys. `body`: reading of bodies. `errors`: OpenAI's error envelope.
`pagination`: lists in pages. `sse`: server-sent events. `logs`: lines of the log.
"""
