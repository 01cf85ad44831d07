"""Parts of the benches about documents: corpora, articles, baselines."""
