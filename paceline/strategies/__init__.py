"""Ways for one or two sides to write one answer, each a pure machine (see `machine`)."""
