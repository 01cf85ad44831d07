"""The reader: an engine whose model points at the answer in a document, for the demonstration.

A span pointer is a distribution over texts, and so has next-token distributions: of the spans that begin with the
answer so far, the share that goes on with a token. So the reader stands behind the contract of `engine.base`.

pointer   the encoder's pass over a question and a document: spans and their probabilities
place     what its sentence, its line and the name of its value tell of a span
question  what the last message of a prompt asks, cut into the parts that are to be answered one after the other
answer    from the readings of the parts to the distribution of the answer's next token
engine    the engine contract, and loading
"""
