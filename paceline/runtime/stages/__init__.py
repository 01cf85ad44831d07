"""A pipeline whose stages are processes.

pipeline      the whole as one asynchronous engine
stage_head    its thread: what is sent to the stages, and what happens when one is lost
members       the stages as their head sees them, put in a row; those that it starts itself
history       what lost stages are built up from again
stage_server  a stage's process: who connects to it, and whom it dials
stage_worker  a stage's thread, which runs its layers
links         links to stages on TLS: dialling and accepting
"""
