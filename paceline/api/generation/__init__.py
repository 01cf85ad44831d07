"""Shared by every endpoint that generates text.

schema       common request fields
request      from the fields to a `GenerateRequest`, and its admission
attachments  files in messages, read into their text
streaming    answers of one or several generations, sent in one piece or as server-sent events
"""
