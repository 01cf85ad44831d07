"""Groups and descriptions of settings, and settings that are tables or sentences of their own.

groups  titles under which settings are shown, and their order
units   processing units of workflows
web     what searches the web
"""
