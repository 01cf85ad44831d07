"""Scheduling of a RAG workflow over every processing unit there is (HeRo, arXiv 2603.01661).

graph      stages, which grow as agents decide; units; facts and instructions of the scheduler
flows      the workflows as stages
profiles   what operations take on units, learnt while they run
placement  criticality of stages (eq. 4); the unit and the shape of a stage's next launch (eq. 3 and 5)
scheduler  the machine: facts in, launches out (algorithm 1)
agents     what each agent is asked, and how what it writes becomes stages
jobs       a question over many passages: what is asked of each, how replies are checked and what they come to
reading    lines, items, words and citations in what agents write
"""
