"""`/v1/responses`, with the event log from which streams are resumed.

`endpoint`: the routes. `request`: from the body to a chat. `events`: from generation events to response events.
`runs`: the tasks that write responses. `event_log`: the events of each response, in SQLite. `passages`: references to
documents in stored events.
"""
