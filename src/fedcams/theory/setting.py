"""The numbers that convergence theorems use: constants of a problem, and the setting of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

EXACT, BOUND, ESTIMATE, LOWER = "exact", "bound", "estimate", "lower bound"
"""How a constant is known: it is the smallest that holds, a proven upper bound, a measurement, or at least this."""


@dataclass(frozen=True)
class Constants:
    """What the theorems assume of a problem; `how` says for each letter how it is known."""

    L: float
    """The gradients of every client's loss are L-Lipschitz."""
    G: float
    """A bound on the length of every stochastic gradient."""
    s_l: float
    """σ_l, whose square bounds the variance of one batch's gradient, at every client."""
    s_g: float
    """σ_g, whose square bounds the mean over clients of ‖∇F_i - ∇f‖²."""
    F: float
    """f(x_1) - min f."""
    d: int
    """The number of coordinates."""
    how: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A run, as the theorems see it: clients, steps, rates and compression.

    Examples:
        >>> from fedcams.theory import Setting
        >>> Setting(m=100, n=10, K=60, T=500, eta=1.0, eta_l=0.01, eps=1e-3).full
        False
    """

    m: int
    """All clients."""
    n: int
    """Clients per round, drawn uniformly without replacement."""
    K: int
    """Local steps per round."""
    T: int
    """Rounds."""
    eta: float
    """The server's learning rate."""
    eta_l: float
    """The local learning rate."""
    eps: float
    """The floor of v̂; for servers that add ε to the root, its square."""
    beta1: float = 0.0
    beta2: float = 0.99
    q: float = 0.0
    """‖C(x) - x‖ ≤ q ‖x‖, not squared."""
    gamma: float = 0.0
    """‖C(mean h) - mean C(h)‖ ≤ γ ‖mean Δ‖, for full participation."""
    shrinks: bool = True
    """Whether ‖C(x)‖ ≤ ‖x‖, as for the sign and top-k."""
    inside: bool = True
    """Whether ε is inside the maximum (FedAMS), rather than added to the root (FedAMSGrad)."""
    adapts: bool = True
    """Whether there is a second moment at all; FedAvg and FedAvgM are FedAMS that never leaves its floor."""

    @property
    def full(self) -> bool:
        """Whether all clients take part in every round."""
        return self.n == self.m

    @property
    def c_b(self) -> float:
        """How many updates the momentum holds: β1/(1-β1)."""
        return self.beta1 / (1 - self.beta1)

    @property
    def alpha(self) -> float:
        """The effective step η η_l K/√ε of a round while v̂ is on its floor."""
        return self.eta * self.eta_l * self.K / math.sqrt(self.eps)

    @property
    def amplification(self) -> float:
        """How many times longer error feedback can make a decoded update than an update."""
        if self.q == 0:
            return 1.0
        return (1 if self.shrinks else 1 + self.q) / (1 - self.q)

    def adaptivity(self, known: Constants) -> float:
        """Return u, the longest possible decoded update divided by √ε; if u ≤ 1, v̂ can never leave its floor."""
        return self.amplification * self.eta_l * self.K * known.G / math.sqrt(self.eps) if self.adapts else 0.0

    def sampling(self, known: Constants) -> float:
        """Return what drawing n of m clients adds to the variance σ_l²/n of a step's gradient."""
        spread = known.s_l**2 + 6 * self.K * known.s_g**2
        drifted = 15 * (self.K * known.L * self.eta_l) ** 2 * spread + 3 * self.K * known.s_g**2
        return 0.0 if self.full else (self.m - self.n) / (self.n * (self.m - 1)) * drifted


@dataclass(frozen=True)
class Condition:
    """One condition of a theorem: `used ≤ allowed`."""

    name: str
    allowed: float
    used: float

    @property
    def holds(self) -> bool:
        """Whether the setting meets it."""
        return self.used <= self.allowed * (1 + 1e-12)


@dataclass(frozen=True)
class Bound:
    """A bound on the average of E‖∇f(x_t)‖² over rounds: its terms add up to it, if its conditions hold."""

    version: str
    terms: Mapping[str, float]
    conditions: tuple[Condition, ...]

    @property
    def value(self) -> float:
        """The sum of the terms."""
        return math.fsum(self.terms.values())

    @property
    def admissible(self) -> bool:
        """Whether all conditions hold."""
        return all(condition.holds for condition in self.conditions)
