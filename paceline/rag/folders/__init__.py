"""Folders and the documents that were read from them.

`matching`: documents by name, id, pattern or folder. `sync`: documents follow the files of folders.
`watching`: waiting for changes of files.
"""
