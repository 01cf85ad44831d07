"""The OpenAI-compatible HTTP API, shared by the server and the device agent, and other APIs as shapes over it.

app            the application: every router by name
chat           `/v1/chat/completions`
completions    `/v1/completions`
responses      `/v1/responses` and `/v1/conversations`
texts          `/v1/embeddings`, `/v1/rerank`, `/tokenize` and `/detokenize`
vector_stores  `/v1/vector_stores` and `/v1/files`
search         filters and ranking of vector stores, and the stores that an answer reads
documents      `/v1/documents`: what this side can read, and what may be asked of it; `/v1/passages/{id}`;
               `/v1/policy`: what would happen to a question, and the confirmation of documents
mcp            `/mcp`: documents as tools of the Model Context Protocol
models         `/v1/models`, and the lookup of models by name
status         `/metrics`, `/v1/status`, version and health
anthropic      Anthropic's Messages API
ollama         Ollama's API
page           the web page
generation     shared by those that generate text
observation    counts, logs and traces of requests for text
openapi        the OpenAPI document
http           everything below the endpoints
"""
