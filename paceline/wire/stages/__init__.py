"""The links of a pipeline whose stages are processes. Pure.

messages  commands of the head, results of the stages, headers of bulk messages
sampling  what is asked of rows, and what was sampled, as messages
link      the state machine of one end: bulk messages in chunks, credits
"""
