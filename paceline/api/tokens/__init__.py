"""`/tokenize` and `/detokenize`: texts and conversations as the model's tokens, and back."""
