"""Retrieval: parse, chunk, embed, index and search documents, and put passages into prompts.

records      documents, passages, selections
parsing      files to title and text, in a process of its own
chunk        text to chunks
embedder     the protocol, loading by name, an encoder in 8 bits
database     SQLite schema and transactions
rows         documents and chunks in the database
index        vector and word search over chunks
entities     names in a text, by a model
rerank       passages scored again, each together with the query
store        document store, uploaded files, vector stores
folders      documents that follow files
web          web search, and fetching pages whose addresses strangers have chosen
document_kv  stored keys and values of documents
prompt       queries from conversations, passages into prompts
"""
