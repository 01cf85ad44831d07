"""Parts of the bench `pipeline`: texts that a real model has written, and real stage processes.

- `recorded`: a model's answers, and an engine that plays them again without the model
- `processes`: the served node on real stages; `staged_node`: that node; `paced_stage`: a stage's process
- `tasks`: questions
"""
