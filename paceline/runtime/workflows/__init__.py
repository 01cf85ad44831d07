"""Workflows of agents, served: launches of the scheduler of `paceline.workflow` on a node's engine, threads and link.

- `kept_profiles`: what its units take, kept over restarts; bytes of launches
- `driver`: carries out launches, and tells the scheduler how they end
- `agent_text`: texts of agents, taken part by part
- `places`, `lookup`: searching, reranking, refining and reading for one question
- `run`: one workflow as a generation
"""
