"""Fast engine: transformers' modules with paged attention, a paged KV cache and packed weights.

- `engine`: `PagedEngine`, and `patch_model`, which replaces a model's attention and linears.
- `kv_cache`: `PagedKvCache`, sequences with their block tables; base class of `PagedEngine` and `Stage`.
- `kv_storage`: `KvStorage`, the tensors that hold K and V in blocks.
- `flat_batch`: a batch as one flat row of tokens. `attention/`: attention over the blocks for it, gathered or tiled.
- `staging`: the integers of a step in one copy to the device. `step_graphs`: steps that are replayed as CUDA graphs.
- `packed_linear`: linears packed for oneDNN, fused decoder layers and MLPs.
- `weights_memory`: gives back the memory of weights that have been packed.
"""
