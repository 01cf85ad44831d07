"""What is counted, logged and traced of requests for text."""
