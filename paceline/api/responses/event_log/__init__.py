"""The log of each response's events in SQLite: committed before they are sent, and sent from it.

`log`: appends and reads events. `store`: its SQLite tables. `replay`: from events back to a response.
"""
