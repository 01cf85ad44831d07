"""Fast engine: transformers' modules with paged attention, a paged KV cache and packed weights.

engine         `PagedEngine`, and `patch_model`, which replaces a model's attention and linears
kv_cache       `PagedKvCache`, sequences with their block tables; base class of `PagedEngine` and `Stage`
attention      attention over the blocks for it, gathered or tiled
packed_linear  fused decoder layers and MLPs, and linears packed for oneDNN
"""
