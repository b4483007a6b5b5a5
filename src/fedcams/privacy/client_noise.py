"""Privacy by noise at the client: the server is not trusted with updates, and sees only noisy ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.vectors import row_norms
from fedcams.compress.identity import IDENTITY
from fedcams.errors import SpecError
from fedcams.privacy.accountant import epsilon
from fedcams.privacy.base import Participation, PrivateParts, Spent, check_delta
from fedcams.privacy.gaussian_noise import GaussianNoise
from fedcams.privacy.secret import gaussian
from fedcams.privacy.sums import digest
from fedcams.registry import Number, number, register
from fedcams.sampler import Sampler
from fedcams.transforms.norms import clip_rows_

if TYPE_CHECKING:
    from torch import Tensor

ANSWERS, SHARES = "answers", "shares"
"""What is counted for each client: the rounds in which it was asked, and the sum of 1/n over them, where n updates with
as many independent noises made the step."""


@register("client")
@dataclass(frozen=True)
class ClientNoise(GaussianNoise):
    """Has every client add Gaussian noise to its own clipped update, so that the server never sees the update itself.

    A client clips Δ to the norm `clip` and adds noise of standard deviation noise·clip to each coordinate. Error
    feedback and compression come after that and see only the noisy update. The client sends no loss and no counts, and
    only noise if its training fails. Give `noise`, or the `epsilon` that a client may lose to the server, at this
    `delta`, if it takes part in every round. Neighbouring runs differ in one client's data: in one of them, the client
    always sends only noise. Records have `local_epsilon`, for anyone who sees the messages, such as the server, and
    `epsilon`, for those who see only the models. The latter is smaller if updates travel by `identity`, because then
    the noise of the whole cohort adds up.
    """

    epsilon: Number | None = number(
        None,
        low=0,
        open="low",
        doc="what a client may lose to the server if it takes part in every round; instead of noise",
    )

    at_client = True
    reference = "Truex et al.: LDP-Fed: Federated Learning with Local Differential Privacy, EdgeSys 2020"
    examples = ("client(clip=1, noise=2)", "client(clip=0.5, epsilon=50, delta=1e-6)")
    refused = (
        ("client(clip=1)", "give either noise or epsilon"),
        ("client(clip=1, noise=1, epsilon=8)", "give either noise or epsilon"),
        ("client(noise=1)", "clip is missing"),
        ("client(clip=1, noise=0)", r"allowed: a number in \[0.1, 1e6\]"),
    )

    # -- what is refused -------------------------------------------------------------------------------------------

    def participation(self, sampler: Sampler | None, clients: int, rounds: int | None) -> Participation:
        if sampler is not None and sampler.needs_weights:
            raise SpecError(
                f"privacy={self} and sampler={sampler}: cohorts would reveal how much data clients have; "
                "use uniform, bernoulli or full"
            )
        check_delta(self, float(self.delta), clients)
        return Participation(1.0, clients, rounds)

    # -- the mechanism ---------------------------------------------------------------------------------------------

    def perturb_(self, rows: Tensor, keys: Sequence[str], round: int, who: Participation) -> None:
        bound, scale = float(self.clip), self.multiplier(who) * float(self.clip)
        rows[~torch.isfinite(row_norms(rows)).to(rows.device)] = 0  # a failure must stay secret too
        clip_rows_(rows, bound)
        for row, key in zip(rows, keys, strict=True):
            values = row.cpu().numpy()
            # noise from the update's own digest: a round that is run again with another update gets other noise,
            # because the difference of two updates with the same noise would have none
            noise = gaussian(key, "update", round, digest(values), len(values))
            row.copy_(torch.from_numpy(values + scale * noise))

    # -- what it costs ---------------------------------------------------------------------------------------------

    def observe(self, spent: Spent, asked: Collection[int], added: int) -> Spent:
        answers, shares = dict(spent.get(ANSWERS, {})), dict(spent.get(SHARES, {}))
        for client in asked:
            answers[client] = answers.get(client, 0) + 1
            shares[client] = shares.get(client, 0.0) + (1 / added if added else 0.0)
        return {ANSWERS: answers, SHARES: shares}

    def epsilon_after(self, rounds: int, who: Participation, spent: Spent, method: PrivateParts) -> dict[str, float]:
        noise, delta = self.multiplier(who), float(self.delta)
        local, shared = (max(spent.get(what, {}).values(), default=0.0) for what in (ANSWERS, SHARES))
        # a sum of n noisy updates has n noises; a mean of compressed ones is not a function of that sum
        counted = shared if _is_plain_mean(method) else local
        return {"epsilon": epsilon(1.0, noise, counted, delta), "local_epsilon": epsilon(1.0, noise, local, delta)}


def _is_plain_mean(method: PrivateParts) -> bool:
    """Return whether the server's step is a function of the sum of the noisy updates and of their number."""
    return method.uplink == IDENTITY and all(transform.points <= {"update"} for transform in method.transforms)
