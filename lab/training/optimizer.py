"""Muon for the matrices and AdamW for the rest, on fp32 master copies of bf16 weights.

Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". Copying from context is learnt
several times earlier with it here than with AdamW alone.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lab.training.data_parallel import Group, alone, flatten, unflatten

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(gradients: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on a stack of matrices (n, rows, columns): singular values are pushed towards one."""
    a, b, c = _COEFFICIENTS
    tall = gradients.shape[1] > gradients.shape[2]
    x = gradients.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


@dataclass(slots=True)
class MuonAdam:
    """Update a model's weights in place and keep their moving average for evaluation."""

    model: nn.Module
    group: Group = field(default_factory=alone)
    matrix_rate: float = 0.02
    other_rate: float = 0.004
    decay: float = 0.02
    average_decay: float = 0.99
    step_count: int = 0
    master: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    _momentum: dict[str, Tensor] = field(default_factory=dict)
    _square: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.model.named_parameters():
            self.master[name] = weight.detach().float().clone()
            self.average[name] = self.master[name].clone()
            self._momentum[name] = torch.zeros_like(self.master[name])
            if not self._by_muon(name, weight):
                self._square[name] = torch.zeros_like(self.master[name])

    @staticmethod
    def _by_muon(name: str, weight: Tensor) -> bool:
        return weight.dim() == 2 and "embed" not in name

    @torch.no_grad()
    def step(self, scale: float) -> float:
        """One update with all rates multiplied by `scale`; returns the norm of the gradient."""
        self.step_count += 1
        weights = dict(self.model.named_parameters())
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        gradients = unflatten(self.group.total(flatten(found)) / self.group.size, found)
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        clip = min(1.0, 1.0 / (norm + 1e-6))
        stacks: dict[torch.Size, list[str]] = defaultdict(list)
        for name, gradient in gradients.items():
            if self._by_muon(name, weights[name]):
                self._momentum[name].lerp_(gradient, 0.05)
                stacks[gradient.shape].append(name)
            else:
                self._adam(name, gradient * clip, scale)
        for name, update in self._directions(gradients, stacks).items():
            rows, columns = update.shape
            rate = self.matrix_rate * scale * max(1.0, rows / columns) ** 0.5
            self.master[name].mul_(1 - self.decay * self.matrix_rate * scale).add_(update, alpha=-rate)
        keep = min(self.average_decay, 1 - 1 / (self.step_count + 1))
        for name, weight in weights.items():
            weight.copy_(self.master[name])
            weight.grad = None
            self.average[name].lerp_(self.master[name], 1 - keep)
        return norm

    def _directions(self, gradients: dict[str, Tensor], stacks: dict[torch.Size, list[str]]) -> dict[str, Tensor]:
        """Muon's update of every matrix; each process of the group computes a share of them."""
        updates = {name: torch.zeros_like(gradients[name]) for names in stacks.values() for name in names}
        for names in stacks.values():
            if mine := names[self.group.rank :: self.group.size]:
                nesterov = torch.stack([gradients[name].lerp(self._momentum[name], 0.95) for name in mine])
                updates.update(zip(mine, orthogonalise(nesterov).float(), strict=True))
        return unflatten(self.group.total(flatten(updates)), updates)

    def _adam(self, name: str, gradient: Tensor, scale: float) -> None:
        momentum, square = self._momentum[name], self._square[name]
        momentum.lerp_(gradient, 0.1)
        square.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
        corrected = momentum / (1 - 0.9**self.step_count)
        spread = (square / (1 - 0.98**self.step_count)).sqrt_().add_(1e-9)
        self.master[name].addcdiv_(corrected, spread, value=-self.other_rate * scale)
