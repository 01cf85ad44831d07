"""The link between a device and a cloud, without I/O: messages, codecs and state machine.

- `messages`: every message and the limits of its fields; `fields`: their types; `identity_messages`: the handshake's
- `codec`: messages to MessagePack frames and back, with validation
- `dist_codec`: truncated distributions in 16 or 64 bits a probability
- `tree_codec`: nodes of the draft tree of `aggregate`
- `lifecycle`: states, triggers and transitions of a link
- `link`: the state machine of one end of a link
- `handshake`: how the two ends of a link prove their keys
- `renewal`: how a device's key is replaced while the link is open
- `enrolment`: how a one-time code authenticates the keys of both
- `signing`: what all three need of a signature scheme
- `effects`: what the link's machine asks its driver to do
- `sessions`: open sessions of a connection and their numbers
- `close_codes`: reasons for closing a link, with advice for the user
- `document`: the generator of `openapi/link.md`
"""
