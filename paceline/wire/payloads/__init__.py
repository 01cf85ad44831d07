"""What messages carry in binary fields, packed and unpacked with every limit checked. Knows no message.

- `tree_codec`: nodes of the draft tree of `aggregate`
- `draft_codec`: chains of drafts of `draft_verify`
- `varints`: token ids in few bytes
"""
