"""Inference engines: run batches of segments on a model; return tokens, or distributions.

base            the contract that all engines obey: `Engine`, `AsyncEngine`, `TextModel`, `ModelInfo` and `Output`
loader          an engine and its tokenizer from a directory, a Hugging Face name or `fake`
hf              reference engine on transformers' own KV cache
paged           fast engine with a paged KV cache
stage           a span of a model's layers, for pipelines
reader          an encoder that points at the answer in a document, as an engine; the demonstration's model
remote          a model behind HTTP servers, such as vLLM's
llama_cpp       engine on llama.cpp, for the quantised models of GGUF files
fake            engine without a model, for tests, the simulator and `--model fake`
layer_kernel    decoder layers on a CPU in C, or parts of them: linears over a file's weights, norms, gates, attention
weights         formats of weights: computed, kept, quantised (FP8, AWQ, GPTQ, compressed-tensors)
sampling        tokens of many rows in one pass, where their logits are
tokenizer       text to token ids and back, and prompts of conversations
chat_template   chat templates rendered in a sandbox
families        what families of models write around an answer: thinking, calls of tools
grammar         token masks of JSON schemas and tool calls
sequence_table  cached rows and open trees of each sequence, with the checks that all engines share
tensors         logits to distributions, tensors to `KvPrefix` and back; the self-test of engines
model_config    settings read from a model's `config.json` and `generation_config.json`
"""
