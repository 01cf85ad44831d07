"""The device's program: the shared HTTP API over its own model and private documents, and its link to a cloud.

activity     `paceline devices activity`
cloud        enrols at a cloud and keeps the link to it open
commands     `paceline agent`
consent      the question at enrolment: who may ask this device through the cloud
credentials  file of credentials, one per cloud
program      the process from start to stop
"""
