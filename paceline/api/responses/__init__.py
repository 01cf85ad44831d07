"""`/v1/responses`, with the event log from which streams are resumed.

`endpoint`: the routes. `schema`: the request body. `request`, `items`, `context`: from the body to a chat.
`events`: from generation events to response events. `runs`: the tasks that write responses.
`event_log`: appends and reads events. `live_events`: those of a response being written. `event_writer`: the log's
thread. `event_store`: its SQLite tables. `replay`: from events back to a response. `stream`: events to a client.
"""
