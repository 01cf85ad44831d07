"""Models: of the Hugging Face hub, fetched by their names, and what lies on this machine.

download   a whole model
cache      the models in the hub's cache and those that Ollama, LM Studio and llama.cpp have fetched; the folder of any
           model that is named
gguf       GGUF files, written as folders
quantize   folders, written as quantised GGUF files
"""
