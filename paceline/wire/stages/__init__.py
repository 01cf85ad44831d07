"""The links of a pipeline whose stages are processes. Pure.

messages  commands of the head, results of the stages, headers of bulk messages; their codec
sampling  what is asked of rows, and what was sampled, as messages
pipe      frames, bulk messages in chunks, credits
"""
