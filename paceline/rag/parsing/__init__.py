"""Parsing: files of many kinds to a title and a text, in a process of their own with limits on all it uses.

kinds    which names are read as what, and every limit
folders  finding files
process  a document as read; the parser processes as their users see them
worker   one of them
sandbox  what is taken from it
readers  functions of kinds, imported in the parser process only

Nothing here but `readers` parses a document's bytes, and no parser imports numpy or torch, so that it starts fast and
holds little in memory.
"""
