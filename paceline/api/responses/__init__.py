"""`/v1/responses`, with the log of events that streams are resumed from."""
