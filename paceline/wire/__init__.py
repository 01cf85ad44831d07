"""The link between a device and a cloud, without I/O: messages, codecs and state machine.

messages         every message with the limits of its fields, and options of strategies
verify_messages  those of `draft_verify`
codec            messages to MessagePack frames and back, with validation; distributions in 16 or 64 bits a probability
payloads         what they carry in binary fields
link             the state machine of one end of a link
identity         who the two ends are
effects          what the link's machine asks its driver to do
close_codes      reasons for closing a link, with advice for the user
stages           the links of a pipeline whose stages are processes
"""
