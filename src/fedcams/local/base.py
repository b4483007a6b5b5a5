"""Local rules: how a step of local training turns gradients into a change of the parameters, on rows `[C, d]`."""

from __future__ import annotations

import contextlib
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch

from fedcams.errors import SpecError
from fedcams.registry import Number, Spec, flag, integer

if TYPE_CHECKING:
    from torch import Tensor

Slots = dict[str, "Tensor"]
"""What a rule remembers between steps: name -> tensor `[C, ...]`. It restarts in every round."""
Rate: TypeAlias = "float | Tensor"
"""The learning rate of a step: one number, or a tensor `[C]` that captured and compiled code reads."""


class Local(Spec, ABC):
    """The base class of all local rules: what a client does with the gradients of its batches.

    A rule is a frozen dataclass with the fields `lr`, its own, then `epochs`, `steps`, `batch` and `drop_last`
    (`epochs_field` and its neighbours declare those). Row i of every tensor belongs to the i-th client.

    Examples:
        >>> import torch
        >>> from fedcams.local import local
        >>> sgd, x = local("sgd(momentum=0.9)"), torch.ones(1, 2)
        >>> sgd.step_(x, torch.tensor([[1.0, 2.0]]), sgd.init(x), 0.5)
        >>> x
        tensor([[0.5000, 0.0000]])
    """

    kind = "local"
    reference: ClassVar[str] = ""
    schedulable: ClassVar[bool] = True
    """Whether numbers of the spec may be schedules; engines then get each round's rate as an argument."""
    elementwise: ClassVar[bool] = True
    """Whether coordinates may be stored in any order, with zeros in between; if not, every engine sets `sections`."""
    sections: tuple[int, ...] = ()
    """The sizes of the tensors that a row consists of; see `in_sections`. Empty if an engine does not give them."""

    replace: bool = False
    """Whether examples are drawn with replacement; a rule may declare it as a field (`replace_field`)."""
    lr: Number
    epochs: int | None
    steps: int | None
    batch: int
    drop_last: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.steps is not None:
            raise SpecError(f"{self.name}: epochs={self.epochs}, steps={self.steps}: give epochs or steps, not both")

    @abstractmethod
    def init(self, x: Tensor) -> Slots:
        """Return the slots of clients that start from the rows `x [C, d]`; what it keeps of x is copied."""

    @abstractmethod
    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        """Take one step in place: change `x [C, d]` and the slots; `gradient [C, d]` may be overwritten.

        Rows that are not `active` (bool `[C]`; None: all are) keep their x and their slots: see `only_active`.
        """

    @property
    def is_plain(self) -> bool:
        """Whether a step is exactly `x -= rate·gradient`; engines may then use a fused kernel."""
        return False

    @property
    def steps_are_rates(self) -> bool:
        """Whether an update is minus the sum of gradients times rates, which control variates need."""
        return self.is_plain

    def in_sections(self, sizes: Sequence[int]) -> Self:
        """Return the same rule for rows that are tensors of these sizes, laid end to end.

        `norms` then rounds like `torch.nn.utils.clip_grad_norm_`, which computes the norm of the tensors' norms.
        """
        other = copy.copy(self)
        object.__setattr__(other, "sections", tuple(sizes))
        return other

    def norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each row `[C, d]` as `[C, 1]`."""
        if self.sections:
            rows = torch.stack([part.norm(dim=-1) for part in rows.split(self.sections, dim=-1)], -1)
        norms: Tensor = rows.norm(dim=-1, keepdim=True)
        return norms


def local(spec: str | Local) -> Local:
    """Return the local rule that a spec string names.

    Arguments:
        spec: such as `sgd(lr=0.05, epochs=3)`; a rule is returned unchanged.

    Returns:
        The rule. It holds no state: `init` makes its slots.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.local import local
        >>> local("sgd(lr=0.05, epochs=3)").epochs
        3
    """
    return Local.parse(spec)


# -- parts of a step ---------------------------------------------------------------------------------------------------


def column(rate: Rate) -> Rate:
    """Return a rate that broadcasts along rows `[C, d]`: `[C, 1]` for `[C]`, and a number unchanged."""
    return rate[:, None] if isinstance(rate, torch.Tensor) else rate


def descend_(x: Tensor, direction: Tensor, rate: Rate) -> None:
    """Compute `x -= rate·direction` in place on rows `[C, d]`."""
    if isinstance(rate, torch.Tensor):
        x.addcmul_(direction, rate[:, None], value=-1)
    else:
        x.sub_(direction, alpha=rate)


@contextlib.contextmanager
def only_active(active: Tensor | None, *rows: Tensor) -> Iterator[None]:
    """Restore the rows of tensors `[C, ...]` that are not active when the `with` block ends.

    `active` is a bool tensor `[C]`; None means that all rows are active, and costs nothing.
    """
    if active is None:
        yield
        return
    before = [tensor.clone() for tensor in rows]
    yield
    for tensor, old in zip(rows, before, strict=True):
        torch.where(active.view(-1, *[1] * (tensor.dim() - 1)), tensor, old, out=tensor)


@functools.cache
def mixes_rows(rule: Local) -> bool:
    """Return whether a step of one row depends on another row, or changes one that is not active.

    Tries a step with two rows; an engine that trains several clients at once would give such a rule a wrong result.
    """
    rule = rule.in_sections((2, 1))
    x, gradient = torch.tensor([[1.0, -2.0, 3.0], [-0.5, 4.0, 1.0]]), torch.tensor([[0.5, 1.0, -2.0], [3.0, -1.0, 0.2]])
    both, slots, alone, own = x.clone(), rule.init(x.clone()), x[:1].clone(), rule.init(x[:1].clone())
    before = [tensor[1].clone() for tensor in slots.values()]
    rule.step_(both, gradient.clone(), slots, 0.1, torch.tensor([True, False]))
    rule.step_(alone, gradient[:1].clone(), own, 0.1)
    after = [tensor[1] for tensor in slots.values()]
    kept = torch.equal(both[1], x[1]) and all(map(torch.equal, after, before))
    return not (kept and torch.allclose(both[:1], alone))


# -- fields that every rule has, besides `lr` --------------------------------------------------------------------------


def epochs_field() -> Any:
    """Declare the field `epochs`: passes over the client's examples per round."""
    return integer(None, low=1, doc="passes over the client's examples; 1 if steps is not given either")


def steps_field() -> Any:
    """Declare the field `steps`: batches per round, instead of `epochs`."""
    return integer(None, low=1, doc="number of batches, over as many epochs as that takes")


def batch_field() -> Any:
    """Declare the field `batch`: examples per step."""
    return integer(20, low=1, doc="examples per step; a client with fewer uses all of them in one batch")


def drop_last_field() -> Any:
    """Declare the field `drop_last`: whether an epoch's last batch is left out if it is not full."""
    return flag(False, doc="leave out an epoch's last batch if it is not full")


def replace_field() -> Any:
    """Declare the field `replace`: whether to draw with replacement, instead of in an epoch's random order."""
    return flag(False, doc="draw examples with replacement, as convergence theorems assume")
