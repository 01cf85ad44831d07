"""`aggregate` (DRAGON): both sides read their own documents and write one answer."""
