"""Growth of the cloud model from the device model: more and wider layers that compute the same function at first."""

from dataclasses import replace

import torch

from lab.training.architecture import Reader


def grow(small: Reader, layers: int = 10, inner: int = 1024, seed: int = 0) -> Reader:
    """Build a larger model that computes the small one's function.

    New layers are spread between the old ones; they and the new MLP columns add nothing until trained, because their
    projections back into the residual stream start at zero.
    """
    shape = replace(small.shape, num_hidden_layers=layers, intermediate_size=inner)
    large = Reader(shape)
    large.initialise(seed)
    old, narrow = small.shape.num_hidden_layers, small.shape.intermediate_size
    places = [round((i + 1) * layers / old) - 1 for i in range(old)]
    with torch.no_grad():
        large.embed_tokens.copy_(small.embed_tokens)
        large.norm.copy_(small.norm)
        for layer in large.layers:
            weights = dict(layer.named_parameters())
            weights["o_proj"].zero_()
            weights["down_proj"].zero_()
        for place, source in zip(places, small.layers, strict=True):
            target = dict(large.layers[place].named_parameters())
            for name, weight in source.named_parameters():
                if name in ("gate_proj", "up_proj"):
                    target[name][:narrow] = weight
                elif name == "down_proj":
                    target[name][:, :narrow] = weight
                else:
                    target[name].copy_(weight)
    return large
