"""Training of the reader: the MiniLM encoder with two heads that point at the start and the end of an answer.

examples  what one example is, and its token ids
folders   questions about folders of everyday files, with the passages that a search finds
sources   examples from SQuAD, Natural Questions and HotpotQA, and from the generated corpus
notes     generated notes as people keep them: lists, prices, dates, code names
topics    generated notes about one thing, named once at the top: fragments that leave it out
clozes    questions made of a text's own sentences
encode    token ids of all examples, in files
train     the training run, on a GPU where there is one
"""
