"""Parts of the benches about drafts.

- `workloads`: models with the prompts of Spec-Bench's tasks. `tiny_models`: checkpoints of the llama2.c format.
- `drafters`: the drafting methods that are compared. `single_session`: one machine on a real engine, without HTTP.
- `adversarial`: settings in which drafts do not pay. `large_shape`: acceptance replayed on a 0.5B shape.
- `agent_loop`: what a memory of earlier answers adds.
- `many_answers`: up to 64 answers at once against plain decoding; a program of its own.
"""
