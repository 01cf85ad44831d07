"""Counts, logs and traces of requests for text."""
