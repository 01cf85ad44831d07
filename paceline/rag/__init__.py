"""Documents: parse, chunk, embed, index, search."""
