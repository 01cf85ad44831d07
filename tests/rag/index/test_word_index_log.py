"""The word index logs nothing of its own: bm25s asks for all of its messages when it is imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
logging.basicConfig(level="INFO")
from paceline.rag.index import BM25Index
assert BM25Index([1, 2], ["a red boat", "the key"]).search("boat", 1)
"""


def test_an_index_is_built_without_a_line_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
