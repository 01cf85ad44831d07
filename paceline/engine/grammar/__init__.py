"""Token masks that hold answers to JSON schemas and tool calls."""
