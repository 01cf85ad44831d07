"""Documents, uploaded files and vector stores: rows in SQLite and bytes in a folder.

`documents`: a side's document store, the entry point for adding, listing and searching. `document_rows`: the one
writer of document and chunk rows. `files`: uploaded files and their bytes. `vector_stores`: collections of uploaded
files; `library`: the facade over files, vector stores and their search.
"""
