"""The beginning of programs that kill themselves: with SIGKILL, just before their n-th step."""

from __future__ import annotations

# argv: a folder, n. A step is a call of `step`, such as an SQL statement of a connection that `traced` has made.
STEPS = """
import io, os, signal, sqlite3, sys
from pathlib import Path
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore

steps, connect = int(sys.argv[2]), sqlite3.connect

def step(*_):
    global steps
    steps -= 1
    if steps == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def traced(*arguments, **options):
    connection = connect(*arguments, **options)
    connection.set_trace_callback(step)
    return connection
"""
