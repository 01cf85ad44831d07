"""Token masks that constrain answers to JSON schemas and tool calls.

- `compiler`: compile a constraint for one vocabulary with llguidance, and evaluate its masks.
- `lark`: constraints as grammars in llguidance's dialect of Lark.
- `json_schema`: checks and relaxations of JSON schemas.
- `closed_objects`: close the objects of a JSON schema to the properties that it names.
"""
