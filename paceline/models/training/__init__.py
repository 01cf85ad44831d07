"""How the demo pair is trained: the corpus, the models, the loop, the evaluation."""
