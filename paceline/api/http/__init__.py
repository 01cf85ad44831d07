"""HTTP below the endpoints.

server      uvicorn with a drain
doors       connections of strangers, and of one key: how many there may be
admission   host, origin, key and number of requests, before routing
auth        keys
routing     routes that check a key's scope and read the body first
body        reading of bodies, and clients that leave
errors      OpenAI's error envelope
pagination  lists in pages
sse         server-sent events
logs        lines of the log
"""
