"""Documents, uploaded files and vector stores: rows in SQLite, read in from files in the background."""
