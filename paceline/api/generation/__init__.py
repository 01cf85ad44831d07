"""Shared by every endpoint that generates text.

`schema`: common request fields. `inputs`: texts or token ids of the older endpoints. `unsupported`: fields that are
refused. `request`: from the fields to a GenerateRequest. `fan_in`: several generations read at the same time. `late`:
those of a model that has to be loaded first. `streaming`: answers sent in one piece or as server-sent events.
`held_open`: connections of those in one piece. `sending`: to clients that may not read.
"""
