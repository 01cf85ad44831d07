"""HTTP below the endpoints.

`server`: uvicorn with a drain. `limits`: what one client may cost others. `auth`: keys. `cors`: hosts and origins.
`body`, `multipart`: reading of bodies. `strict_json`, `validation`: from bytes to a schema. `errors`: OpenAI's error
envelope. `pagination`: lists in pages. `sse`: server-sent events. `logs`: lines of the log.
"""
