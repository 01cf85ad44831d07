"""The OpenAI-compatible HTTP API, shared by the server and the device agent.

`app`: the application. `routes`: its table of routes. `openapi`: the document made from it. `description`: the route
that serves it. `models`: models, health. `chat`, `completions`, `responses`, `embeddings`, `vector_stores`: one package
per endpoint. `page`: the web page. `generation`: shared by those that generate text. `http`: everything below the
endpoints.
"""
