"""What travels between a device and a cloud: messages, their codec, and the link as a state machine. Pure."""
