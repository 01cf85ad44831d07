"""What is told of settings beside their fields, and settings that are tables or sentences of their own.

groups  titles under which settings are shown, and their order
units   processing units of workflows
web     what searches the web
"""
