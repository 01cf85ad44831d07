"""Engine without a model, for tests, the simulator and `--model fake`.

- `engine`: `FakeEngine`, a seeded table model over bytes, and wrappers that perturb or replace its distributions.
- `bigram_model`: letter statistics of a word list, the base of its distributions.
- `tokenizer`: one token id per byte.
"""
