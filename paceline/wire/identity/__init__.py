"""Who the two ends of a link are: proved by keys, never by a secret that is sent.

- `handshake`: how both ends prove their keys
- `renewal`: how a device's key is replaced while the link is open
- `enrolment`: how a one-time code authenticates the keys of both
"""
