"""Operations, time and energy of drafting on a device (GELATO eq. 1 and 3), where they are modelled, not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer that a forward's operations depend on.

    By default the paper's formula: attention without grouped queries, a feed-forward network of two matrices, no
    output head. Not counted: norms, activations, positions, sampling.
    """

    layers: int
    hidden: int
    inner: int
    kv_share: float = 1.0  # heads of keys and values ÷ heads of queries
    matrices: int = 2  # of the feed-forward network; 3 where it is gated
    vocab: int = 0  # rows of the output head; 0: left out

    def flops(self, tokens: int, context: int) -> float:
        """Operations of `tokens` forwards of one row, one after another, behind `context` cached rows."""
        d = self.hidden
        queries_and_output = 4.0 * d * d
        keys_and_values = 4.0 * self.kv_share * d * d
        attention = 4.0 * (context + tokens / 2.0) * d
        feed_forward = 2.0 * self.matrices * d * self.inner
        per_layer = queries_and_output + keys_and_values + attention + feed_forward
        return tokens * (self.layers * per_layer + 2.0 * d * self.vocab)


@dataclass(frozen=True, slots=True)
class Device:
    """Speed and power of a device, as its owner states them."""

    flops_per_s: float
    compute_w: float  # while it computes
    send_w: float  # while it sends

    def draft_s(self, shape: ModelShape, tokens: int, context: int) -> float:
        """Seconds of drafting (T^D)."""
        return shape.flops(tokens, context) / self.flops_per_s

    def joules(self, draft_s: float, send_s: float) -> float:
        """Energy of drafting and sending for so many seconds (eq. 3)."""
        return self.compute_w * draft_s + self.send_w * send_s
