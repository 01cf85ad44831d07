"""Times of steps, as they were seen.

- `prefill_pace`: how many rows of long prompts a step takes beside answers
- `step_times`: seconds of a step by its rows
"""
