"""Shared by every endpoint that generates text.

schema       common request fields
request      from the fields to a `GenerateRequest`
attachments  files in messages, read into their text
fan_in       several generations read at the same time
streaming    answers sent in one piece or as server-sent events
links        where a cited passage can be seen
"""
