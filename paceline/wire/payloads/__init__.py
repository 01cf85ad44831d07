"""Binary fields of messages, and the short form of a message, with every limit checked on unpacking. Knows no message.

- `compact`: short forms of messages that are sent for every few tokens
- `tree_codec`: nodes of the draft tree of `aggregate`; `dist_list`: their distributions
- `draft_codec`: chains of drafts of `draft_verify`
- `draft_places`: tokens of a draft chain with second guesses
- `target_codec`: decided tokens with their lanes or sources
- `varints`: token ids in few bytes; `bits`: numbers smaller than a byte
"""
