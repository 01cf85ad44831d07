"""Shared by every endpoint that generates text.

`schema`: common request fields. `inputs`: texts or token ids of the older endpoints. `unsupported`: fields that are
refused. `request`: from the fields to a GenerateRequest. `fan_in`: several generations read at the same time.
`streaming`: answers sent in one piece or as server-sent events.
"""
