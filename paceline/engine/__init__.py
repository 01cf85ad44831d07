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
number_format   format in which a model is computed, the one of its weights, and why
stored_weights  linears, experts and embeddings over weights in the file's format
quantized       quantised checkpoints: FP8, AWQ, GPTQ, compressed-tensors
sampling        tokens of many rows in one pass, where their logits are
tokenizer       text to token ids and back, and prompts of conversations
chat_template   chat templates rendered in a sandbox
thinking        what a model writes before its answer: its marks, the division of a text, masks
tool_formats    how families of models write calls of tools, as data
grammar         token masks of JSON schemas and tool calls
sequence_table  cached rows and open trees of each sequence, with the checks that all engines share
tensors         logits to distributions, tensors to `KvPrefix` and back
self_test       check at load time that an engine scores as the model's plain forward does
model_config    settings read from a model's `config.json` and `generation_config.json`
"""
