"""Settings that are tables or sentences of their own, read for `paceline.settings`.

units   processing units of workflows
web     what searches the web
"""
