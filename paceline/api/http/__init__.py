"""HTTP below the endpoints.

server      uvicorn with a drain
admission   connections of strangers and of one key; host, origin, key and number of requests, before routing
auth        keys
routing     routes that check a key's scope and read the body first, and what endpoints are given
hop         requests that another server of the same database answers
body        bodies as JSON and forms, lists in pages, and clients that leave
errors      OpenAI's error envelope
logs        lines of the log
"""
