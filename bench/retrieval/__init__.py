"""Parts of the benches about documents.

- `at_rest`: what encrypting a store costs. `ingest`: what adding documents costs.
- `articles`: articles cut into passages and test windows. `corpora`: their split into test, fit and training text.
- `methods`: documents in prompts, by method. `scorers`: probabilities of text under an engine.
- `search_again`: what another search while the text grows would give.
- `ngram_model`: a language model of counts, with copying from the context.
"""
