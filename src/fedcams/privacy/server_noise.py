"""Privacy by noise at the server: clients trust the server, but no one else who sees its models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.privacy.accountant import epsilon
from fedcams.privacy.base import Participation, PrivateParts, Spent, check_delta
from fedcams.privacy.gaussian_noise import GaussianNoise
from fedcams.privacy.secret import gaussian
from fedcams.privacy.sums import ClippedSum, digest
from fedcams.registry import register
from fedcams.sampler import Sampler
from fedcams.transforms.norms import clip_rows_

if TYPE_CHECKING:
    from torch import Tensor


@register("server")
@dataclass(frozen=True)
class ServerNoise(GaussianNoise):
    """Adds Gaussian noise to the sum of the individually clipped updates, so that no model reveals a single client.

    Clients clip y = Δ + e to the norm `clip` before they compress it. The server clips every decoded row again, divides
    the sum by the expected size p·m of a cohort, however many replied, and adds noise of standard deviation
    noise·clip/(p·m) to each coordinate. Every round takes a step, even without an update. Give `noise`, or the
    `epsilon` that the whole run may spend at this `delta`. Neighbouring runs differ in one client with its data and its
    memory. Needs `bernoulli(p)` or `full` cohorts, which are drawn from a secret key.
    """

    reference = "McMahan et al.: Learning Differentially Private Recurrent Language Models, ICLR 2018"
    examples = ("server(clip=1, noise=1.1)", "server(clip=0.5, epsilon=8, delta=1e-6)")
    refused = (
        ("server(clip=1)", "give either noise or epsilon"),
        ("server(clip=1, noise=1, epsilon=8)", "give either noise or epsilon"),
        ("server(noise=1)", "clip is missing"),
        ("server(clip=0, noise=1)", r"allowed: a number in \(0, 1e6\]"),
        ("server(clip=1, noise=0)", r"allowed: a number in \[0.1, 1e6\]"),
    )

    # -- what is refused -------------------------------------------------------------------------------------------

    def reasons(self, method: PrivateParts) -> Iterator[str]:
        """Yield what would invalidate the claim, why, and the fix."""
        yield from super().reasons(method)
        if method.min_replies != 1:
            yield f"min_replies={method.min_replies}: a skipped step would reveal how many took part; leave it out"
        if not method.uplink.never_lengthens:
            yield f"uplink={method.uplink}: C(x) may be longer than x, and clip would cut it; use topk, ternary or sign"
        if not method.downlink.hides_cohorts:
            yield f"downlink={method.downlink}: what a client receives depends on other clients; use none or replica"

    def participation(self, sampler: Sampler | None, clients: int, rounds: int | None) -> Participation:
        if sampler is None or sampler.probability is None:
            raise SpecError(
                f"privacy={self} and sampler={sampler}: sampling protects only if each client is drawn independently "
                "and in secret; use bernoulli(p=...) or full"
            )
        check_delta(self, float(self.delta), clients)
        return Participation(sampler.probability, clients, rounds)

    # -- the mechanism ---------------------------------------------------------------------------------------------

    def clip_(self, rows: Tensor) -> None:
        clip_rows_(rows, float(self.clip))

    def clipped_sum(self, layout: Layout, in_order: bool) -> ClippedSum:
        return ClippedSum(layout, float(self.clip), in_order)

    def noisy_mean(self, total: ClippedSum, who: Participation, key: str, round: int) -> Tensor:
        sums = total.total()
        # noise from the sum's own digest: a round that is run again with other replies gets other noise, because the
        # difference of two sums with the same noise would have none
        noise = gaussian(key, "noise", round, digest(sums), len(sums))
        mean = (sums + self.multiplier(who) * float(self.clip) * noise) / (who.p * who.clients)
        return torch.from_numpy(mean).float()

    # -- what it costs ---------------------------------------------------------------------------------------------

    def epsilon_after(self, rounds: int, who: Participation, spent: Spent, method: PrivateParts) -> dict[str, float]:
        return {"epsilon": epsilon(who.p, self.multiplier(who), rounds, float(self.delta))}
