"""HTTP below the endpoints.

server      uvicorn with a drain
doors       connections of strangers, and of one key: how many there may be
admission   host, origin, key and number of requests, before routing
auth        keys
routing     routes that check a key's scope and read the body first, and what endpoints are given
hop         requests that another server of the same database answers
body        bodies as JSON and forms, and clients that leave
errors      OpenAI's error envelope
pagination  lists in pages
logs        lines of the log
"""
