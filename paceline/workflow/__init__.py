"""Scheduling of a RAG workflow over every processing unit there is (HeRo, arXiv 2603.01661); specs 3.

- `graph`: the partially observed graph of sub-stages, which grows as agents decide
- `activity`: launches under way, their bandwidth and when they end (eq. 1 and 2)
- `placement`: the unit and the shape of a sub-stage's next launch (eq. 5)
- `scheduler`: the machine: facts in, launches out (algorithm 1)
- `agents`: what each agent is asked, and how what it writes is read
"""
