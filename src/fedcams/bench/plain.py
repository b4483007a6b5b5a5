"""FedCAMS as one writes it by hand in PyTorch: the baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedcams.engines import Examples
from fedcams.local import Local


class PlainLoop:
    """A loop over clients, each trained by `torch.optim`; scaled sign with error feedback, AMSGrad on the server."""

    def __init__(self, model: nn.Module, clients: Sequence[Examples], test: Examples, local: Local) -> None:
        self.model, self.clients, self.test, self.local = model, clients, test, local
        self.x = parameters_to_vector(model.parameters()).detach().clone()
        self.m, self.v, self.v_max = (torch.zeros_like(self.x) for _ in range(3))
        self.residuals: dict[int, Tensor] = {}
        self.loss = nn.CrossEntropyLoss()

    def train(self, cohort: Sequence[int]) -> list[Tensor]:
        """The update of each client."""
        return [self._train_one(*self.clients[client]) for client in cohort]

    def average(self, cohort: Sequence[int]) -> float:
        """A round of FedAvg; returns the accuracy."""
        self.x = self.x + torch.stack(self.train(cohort)).mean(0)
        return self._evaluate()[1]

    def round(self, cohort: Sequence[int]) -> str:
        """A round of FedCAMS, with bits packed and a line to record."""
        decoded, sent = [], 0
        for client, delta in zip(cohort, self.train(cohort), strict=True):
            h = delta + self.residuals.get(client, 0)
            scale, positive = h.abs().mean(), h >= 0
            sent += len(np.packbits(positive.numpy()).tobytes()) + 4
            decoded.append(torch.where(positive, scale, -scale))
            self.residuals[client] = h - decoded[-1]
        self._step(torch.stack(decoded).mean(0))
        loss, accuracy = self._evaluate()
        return json.dumps({"cohort": list(cohort), "loss": loss, "accuracy": accuracy, "sent": sent})

    def _train_one(self, x: Tensor, y: Tensor) -> Tensor:
        vector_to_parameters(self.x.clone(), self.model.parameters())  # parameters become views of it
        optimizer = torch.optim.SGD(self.model.parameters(), float(self.local.lr))
        for _ in range(self.local.epochs or 1):
            for batch in torch.randperm(len(x)).split(self.local.batch):
                loss = self.loss(self.model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return parameters_to_vector(self.model.parameters()).detach() - self.x

    def _step(self, delta: Tensor, lr: float = 0.03, eps: float = 1e-3) -> None:
        self.m = 0.9 * self.m + 0.1 * delta
        self.v = 0.99 * self.v + 0.01 * delta**2
        self.v_max = torch.maximum(self.v_max, self.v).clamp(min=eps)
        self.x = self.x + lr * self.m / self.v_max.sqrt()

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        vector_to_parameters(self.x.clone(), self.model.parameters())  # parameters become views of it
        x, y = self.test
        outputs = self.model(x)
        return float(self.loss(outputs, y)), float((outputs.argmax(1) == y).float().mean())
