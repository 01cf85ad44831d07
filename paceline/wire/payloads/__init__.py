"""What messages carry in binary fields, packed and unpacked with every limit checked. Knows no message.

- `tree_codec`: nodes of the draft tree of `aggregate`; `dist_list`: their distributions
- `draft_codec`: chains of drafts of `draft_verify`
- `draft_places`: tokens of a draft chain with second guesses
- `target_codec`: decided tokens with their lanes or sources
- `varints`: token ids in few bytes; `bits`: numbers smaller than a byte
"""
