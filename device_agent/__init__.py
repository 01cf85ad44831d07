"""The device's program: the shared HTTP API over its own model and private documents, and its link to a cloud.

activity     `paceline devices activity`
cloud        its credential at a cloud, enrolment and link
commands     `paceline agent`, `stage`, `setup`, `join` and `devices activity`
link_check   what `paceline doctor` says of the link
program      the process from start to stop
setup        `paceline setup` and `paceline join`
stage        layers of a model as a process, for a server
"""
