"""The device's program: the shared HTTP API over its own model and private documents, and its link to a cloud.

activity     `paceline devices activity`
cloud        keeps this device enrolled at a cloud, and linked to it
commands     `paceline agent`, `paceline stage` and `paceline devices activity`
credentials  file of keys, one entry per cloud
enrolment    exchanges keys with a cloud by a one-time code
link_check   what `paceline doctor` says of the link
program      the process from start to stop
stage        layers of a model as a process, for a server
"""
