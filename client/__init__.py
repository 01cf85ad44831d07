"""The client: a terminal that talks to a server over HTTP alone. Needs neither a model nor torch."""
