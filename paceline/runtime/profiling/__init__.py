"""Measuring what operations take on a node's units, in advance: `paceline profile`.

- `operations`: launches on the engine's lanes and on the host's threads, as workflows make them
- `loads`, `streaming`: what runs beside them: copies of memory by other processes, other launches
- `measurement`: the plan: seconds by shape, then slowdowns, within a bounded time
- `side`: all of it for one side
"""
