"""Energy of engine steps and of messages, and its share for each answer.

- `values`: joules with where they come from; what a machine is told; what an answer has used
- `meters`: meters of engine steps: from counters, from power, from the model's operations; and one behind another
- `answer`: the account of one answer at one side
"""
