"""The links of a pipeline whose stages are processes. Pure.

messages  commands of the head, results of the stages, headers of bulk messages, what is asked of rows
link      the state machine of one end: bulk messages in chunks, credits
"""
