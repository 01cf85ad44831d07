"""A process that copies memory, for a share of its time, until its input ends: `python -m` this module.

Each line of its input is the share from now on, 0 to 1; it answers with the bytes read and written so far.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import numpy as np

BUFFER: Final = 64 << 20  # bytes, beyond what caches hold
PART: Final = 2 << 20  # bytes between two looks at the share
PAUSE_S: Final = 0.005  # between looks while it does nothing


class Copier:
    """Copies on the thread that calls `run`; `share` and `moved` may be used on any."""

    def __init__(self) -> None:
        self.share = 0.0
        self.moved = 0
        self.ended = False

    def run(self) -> None:
        source = np.ones(BUFFER // 8)
        target = np.zeros_like(source)
        rows, place = PART // 8, 0
        while not self.ended:
            share = self.share  # once: another thread sets it
            if share <= 0.0:
                time.sleep(PAUSE_S)
                continue
            began = time.perf_counter()
            target[place : place + rows] = source[place : place + rows]
            self.moved += 2 * PART
            place = (place + rows) % len(source)
            if share < 1.0:
                time.sleep((time.perf_counter() - began) * (1.0 / share - 1.0))


def main() -> None:
    copier = Copier()
    thread = threading.Thread(target=copier.run, daemon=True)
    thread.start()
    for line in sys.stdin:
        if not thread.is_alive():
            sys.exit("nothing is copied any more")
        copier.share = min(1.0, max(0.0, float(line)))
        sys.stdout.write(f"{copier.moved}\n")
        sys.stdout.flush()
    copier.ended = True
    thread.join()


if __name__ == "__main__":
    main()
