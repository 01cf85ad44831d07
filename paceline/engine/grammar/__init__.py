"""Token masks that constrain answers to JSON schemas and tool calls.

compiler     compiles a constraint for one vocabulary with llguidance, and evaluates its masks
json_schema  checks and relaxations of JSON schemas
"""
