"""HTTP without OpenAI: server, admission, keys, bodies, errors, streams."""
