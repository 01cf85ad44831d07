"""`/v1/responses` and `/v1/conversations`, with the event log from which streams are resumed.

endpoint       the routes of responses
begun          responses to be written: their conversations, and those of servers that are gone
conversations  the routes of conversations
request        from the body to a chat
events         from generation events to response events, and from stored ones back to a response
runs           the tasks that write responses
log            the events of each response, on their way to readers
store          responses and conversations in a database
"""
