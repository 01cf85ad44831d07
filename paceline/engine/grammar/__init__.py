"""Token masks that constrain answers to JSON schemas and tool calls.

- `compiler`: compile a constraint for one vocabulary with llguidance, and evaluate its masks.
- `json_schema`: checks and relaxations of JSON schemas.
"""
