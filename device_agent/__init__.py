"""The device's program: the shared HTTP API over its own model and private documents, and its link to a cloud.

cloud        enrols at a cloud and keeps the link to it open
commands     `paceline agent`
credentials  file of credentials, one per cloud
program      the process from start to stop
"""
