"""Documents, uploaded files and vector stores: rows in SQLite and bytes in a folder. All write through `rag.rows`.

documents      a side's document store, the entry point for adding, listing and searching
files          uploaded files and their bytes
vector_stores  collections of uploaded files
library        the facade over files, vector stores and their search, and reading files into stores
readable       documents as one reader may see them
conversion     encrypting a plain store
"""
