"""Look-up tables on disk, one a key, and warming them up."""
