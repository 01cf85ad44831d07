"""The agents of a workflow: what each is asked, and how what it writes is read while it writes (HeRo, 2603.01661).

- `records`: passages with the place they come from, and what agents make of them
- `agent`: what an agent is: its stage in `workflow.builder`, prompt, parser and limit of tokens
- `reading`: lines, items and citations out of pieces of text
- `fence`: untrusted text in prompts
- `queries`, `statements`: parsers of what is searched for and of what was refined
- `rewrite`, `plan`, `look`, `refine`, `answer`: the five agents
- `registry`: all of them by stage

Pure: text in, messages and decisions out; no model, clock or chance. No text of a model raises, and decisions do not
depend on how it is cut into pieces. Small models often write nonsense, so each agent has a fallback, and its result
says when that was taken.
"""
