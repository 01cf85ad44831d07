"""The cloud's program: the HTTP API shared with the device, plus enrolment of devices and their links.

app        the application: the shared API with the routes of enrolment, which it has, and of the link
commands   `paceline serve`, `invite`, `devices`, `keys` and `database`
database   `paceline database copy`, and what `paceline doctor` says of a database
devices    registry of devices: public keys and one-time codes
keys       API keys, stored as hashes
links      `/v1/link`: admits devices, has their keys renewed, closes links of revoked ones
program    the process from start to stop
stages     the stages of the model, where its layers are spread over processes
state      SQLite file shared by the server and its commands
"""
