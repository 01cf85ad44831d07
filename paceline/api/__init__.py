"""The OpenAI-compatible HTTP surface, shared by the server and the device agent."""
