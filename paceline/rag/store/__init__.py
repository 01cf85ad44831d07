"""Documents, uploaded files and vector stores: rows in SQLite and bytes in a folder.

`documents`: a side's document store, the entry point for adding, listing and searching.
`document_writer`: chunk, embed and write documents of the default collection.
`document_rows`: the one writer of document and chunk rows.
`passage_search`: search over the rows, and the index file.
`files`: uploaded files and their bytes.
`vector_stores`: collections of uploaded files; `vector_store_rows`: their records, read from rows.
`ingester`: the background thread that reads files into vector stores, owners in turns.
`library`: the facade over files, vector stores and their search.
`filters`: conditions on file attributes. `paging`: pages of lists.
"""
