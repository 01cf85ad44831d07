"""Workflows of agents, served: launches of the scheduler of `paceline.workflow` on a node's engine, threads and link.

- `kept_profiles`, `demand`: what its units take, kept over restarts; bytes of launches
- `driver`: carries out launches, and tells the scheduler how they end
- `cloud_texts`: the cloud's model as units of a device
- `text_stream`, `agent_text`: texts of agents, taken part by part
- `readers`: what becomes of them
- `places`, `lookup`: searching, reranking, refining and reading for one question
- `shortlist`: which of what was found is read
- `run`: one workflow as a generation
- `service`: all of a node
"""
