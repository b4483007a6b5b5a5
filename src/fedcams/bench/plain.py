"""A federated round as one writes it by hand in PyTorch: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcams.engines import Examples
from fedcams.local import SGD


@dataclass
class PlainLoop:
    """FedAvg over a list of clients: no compression, no bytes counted, nothing recorded but the test accuracy."""

    model: nn.Module
    clients: Sequence[Examples]
    test: Examples
    local: SGD

    def __post_init__(self) -> None:
        self.weights = [p.detach().clone() for p in self.model.parameters()]

    def train(self, cohort: Sequence[int]) -> list[list[Tensor]]:
        """The weights of each client after its epochs."""
        return [self._train_one(*self.clients[client]) for client in cohort]

    def round(self, cohort: Sequence[int]) -> float:
        """Trains, averages, evaluates; returns the accuracy."""
        trained = self.train(cohort)
        self.weights = [torch.stack(same).mean(0) for same in zip(*trained, strict=True)]
        self._load()
        x, y = self.test
        with torch.no_grad():
            return float((self.model(x).argmax(1) == y).float().mean())

    def _train_one(self, x: Tensor, y: Tensor) -> list[Tensor]:
        self._load()
        optimizer = torch.optim.SGD(self.model.parameters(), float(self.local.lr))
        loss_of = nn.CrossEntropyLoss()
        for _ in range(self.local.epochs or 1):
            for batch in torch.randperm(len(x)).split(self.local.batch):
                loss = loss_of(self.model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]

    def _load(self) -> None:
        with torch.no_grad():
            for p, weight in zip(self.model.parameters(), self.weights, strict=True):
                p.copy_(weight)
