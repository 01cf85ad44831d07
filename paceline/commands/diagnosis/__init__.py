"""Checks of `paceline doctor`. Programs add some of their own: `commands.groups`.

checks    the order of all checks; machine, installation, stores and settings
outcome   what a check tells
models    the models of the settings, before any is loaded
programs  what runs on the port of the settings
"""
