"""One module per claim. Each has NAME, SUMMARY, and run(options) -> Report; `paceline bench` finds them by that.

Definitions of every number: METHODOLOGY.md. What was tried, with dates: LOG.md.
"""
