"""Parts of the benches about two sides.

- `link_replay`: one answer of `aggregate` in virtual time. `placement_rules`: rules for the aggregator's place in it.
- `live_placement`: the served machines while speeds, link or text (`turning_engine`) change in mid-answer.
- `payload_bytes`: bytes per drafted token on the link. `session_bytes`: of whole answers, with a vocabulary of a real
  one's size (`wide_engine`).
- `process_pair`: server and agent as linked processes. `two_process_rig`: two nodes in two processes, for `ttft`.
"""
