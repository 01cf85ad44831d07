"""Scheduling of a RAG workflow over every processing unit there is (HeRo, arXiv 2603.01661); specs 3.

- `units`: processing units, the models they hold, zones, what moving data to them takes
- `profiles`: seconds and bandwidth by shape, slowdown under contention; `regression` fits them
- `graph`: the partially observed graph of sub-stages, which grows as agents decide
- `templates`: the three workflows as sub-stages, and what their agents are expected to decide
- `partition`: the shapes in which a sub-stage's work is cut (eq. 3)
- `criticality`: which sub-stage the end of the workflow waits for (eq. 4)
- `activity`: launches under way, their bandwidth and when they end (eq. 1 and 2)
- `turns`: owners take turns on the units
- `placement`: the unit and the shape of a sub-stage's next launch (eq. 5)
- `events`, `policy`, `scheduler`: the machine: facts in, launches out (algorithm 1)
- `agents`: what each agent is asked, and how what it writes is read

Pure: no clock, thread or model. `runtime/workflows` drives it in the server, `bench/workflow` in virtual time.
"""
