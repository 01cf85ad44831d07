"""DRAGON's arithmetic: weights of documents and sides, the aggregators, and where the aggregator runs. Pure."""
