"""The device: the shared HTTP surface over its own model and private documents, and its link to a cloud."""
