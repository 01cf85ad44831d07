"""Benches, one module per claim. Each has NAME, SUMMARY and run(options) -> Report, by which `paceline bench` finds it.

- `aggregate`: time per token of `aggregate` against the round trip; `aggregate_virtual`: the part that needs no quiet
  machine. `ttft`: time to first token with stored KV.
- `scheduling`: placement of the aggregator. `two_sided`: answers from documents of both sides.
- `pipeline`: a model in stages, by how drafts flow through them.
- `draft_verify`: drafts of the device, verified in the cloud. `lookup_tree`: drafting without a model.
- `engine`: milliseconds per forward (`gpu_step`: its part on a GPU). `constraints`: validity of answers.
- `notes`: what the demonstration reads in notes written by hand (`questions/notes.json`).
- `answers`: right answers of one side, of both by several ways, and of one context; real models as well.
- `reading`: several passages in one context, with stored KV reused.
- `handoff`: what a small model may answer alone.
- `leakage`: what a curious cloud learns of a device's documents beyond the answers.
- `perplexity`: perplexity of text given documents. `streams`, `surface`: throughput and CPU of the HTTP server.
- `serving`: the HTTP server against others on the same weights, its prefix cache, host time and memory.
- `streamed_answer`, `wide_vocabulary`: parts of `aggregate`; `first_token`: of `ttft`; `guess_scores`: of `leakage`.
- `real`: drafts and bytes of real models' answers. `greedy`: their text against transformers' and llama.cpp's.
- `command`: `paceline bench`. `report`: options, claims and reports. `plots`: their pictures, and the page of
  `--report`. `models`: real models by name, for `--models`. `bootstrap`: intervals. `terminal`: the
  recording in the README. `page_stream.mjs`: long answers streaming into the web page, in Chromium.
  `aggregation/`, `drafting/`, `retrieval/`, `speculation/`: parts of the benches.

Definitions of all numbers: METHODOLOGY.md. Dated results: LOG.md.
"""
