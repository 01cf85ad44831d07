"""The log of each response's events in SQLite: committed before they are sent, and sent from it.

`log`: appends and reads events. `live_events`: those of a response being written. `writer`: the log's thread.
`store`: its SQLite tables. `sealing`: encryption of what they hold. `replay`: from events back to a response.
"""
