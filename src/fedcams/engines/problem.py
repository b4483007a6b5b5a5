"""What an engine trains: a model, a loss, a local rule and the clients' examples."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.engines.padding import ignores_padding
from fedcams.engines.trees import Tree, call, concatenate, map_tensors, size, take
from fedcams.errors import SpecError, UpdateError
from fedcams.keys import generator
from fedcams.layout import Layout
from fedcams.local import Local
from fedcams.tasks import Augmentation

if TYPE_CHECKING:
    from torch import Tensor, nn

Examples = tuple[Tree, Tree]
"""Inputs `[n, ...]` and targets `[n, ...]`, each a tensor, or a tuple or dict of tensors."""
Loss = Callable[[Any, Any], "Tensor"]
"""(outputs, targets) -> the loss of each example `[B]`, or their mean; several numbers each `[B, ...]` are averaged."""
Step = Callable[..., "tuple[Tensor, ...]"]


class Shards(Mapping[int, Examples]):
    """Clients whose examples are parts of one data set, which is stored once and never copied as a whole."""

    def __init__(self, x: Tensor, y: Tensor, parts: Sequence[NDArray[np.int64]]) -> None:
        self.x, self.y, self.parts = x, y, list(parts)

    def __getitem__(self, client: int) -> Examples:
        part = torch.from_numpy(self.parts[client]).to(self.x.device)
        return self.x[part], self.y[part]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.parts)))

    def __len__(self) -> int:
        return len(self.parts)

    def places(self, client: int) -> NDArray[np.int64]:
        """Return the positions of a client's examples in the data set; refuses an empty client."""
        if len(self.parts[client]) == 0:
            raise UpdateError(
                f"client {client} has 0 inputs and 0 targets; give at least one input, and one target for each"
            )
        return self.parts[client]

    def sizes(self) -> list[int]:
        """Return the number of examples of each client."""
        return [len(part) for part in self.parts]


SEARCHED = 10
"""How many clients may be loaded to find one with two examples."""


def with_two_examples(clients: Mapping[int, Examples]) -> tuple[int, Examples]:
    """Return a client with its examples: the first of ten that has two examples, or else the first."""
    for client in itertools.islice(clients, SEARCHED):
        examples = clients[client]
        if size(examples[1]) > 1:
            return client, examples
    first = next(iter(clients))
    return first, clients[first]


class Pool(NamedTuple):
    """The examples of some clients in one place."""

    x: Tree
    y: Tree
    places: list[NDArray[np.int64]]
    """The positions of each client's examples."""


@dataclass(frozen=True)
class Problem:
    """Everything that stays the same from round to round. Engines may overwrite the model.

    Examples:
        >>> import torch
        >>> from fedcams.engines import Problem, engine
        >>> from fedcams.local import local
        >>> examples = {0: (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))}
        >>> problem = Problem(torch.nn.Linear(2, 3), torch.nn.functional.cross_entropy, examples, local("sgd(steps=2)"))
        >>> engine("loop").train(problem, torch.zeros(9), None, [0], round=1, seed=1).delta.shape
        torch.Size([1, 9])
    """

    model: nn.Module
    loss: Loss
    clients: Mapping[int, Examples]
    local: Local
    prepare: Callable[[Any], Any] = lambda x: x
    """Raw inputs -> what the model takes, such as uint8 images -> normalised float32."""
    augment: Augmentation | None = None

    @functools.cached_property
    def layout(self) -> Layout:
        """The model's trainable parameters."""
        return Layout.of(self.model)

    @functools.cached_property
    def rule(self) -> Local:
        """The local rule for rows in the order of the layout: one that is not elementwise knows its tensors' sizes."""
        return self.local if self.local.elementwise else self.local.in_sections(self.layout.sizes)

    @functools.cached_property
    def buffer_layout(self) -> Layout | None:
        """The model's floating-point buffers."""
        return Layout.of_buffers(self.model)

    @functools.cached_property
    def may_pad(self) -> bool:
        """Whether examples of weight zero change nothing: the model mixes no examples, and each has its own loss."""
        if any(map(_mixes_examples, self.model.modules())) or not self.has_loss_per_example:
            return False
        return ignores_padding(self, self.examples_of(with_two_examples(self.clients)[0]))

    @functools.cached_property
    def has_loss_per_example(self) -> bool:
        """Whether the loss function returns the loss of each example, which depends on no other; tried with two."""
        own = self.examples_of(with_two_examples(self.clients)[0])
        x, y = take(own, torch.arange(2, device=self.device) % size(own))  # a copy, as a model may change it in place
        with self.evaluating() as model:
            outputs = call(model, self.prepare(x))
            together = self.losses(outputs, y)
            if together.shape != (2,):
                return False
            try:
                alone = [self.losses(*take((outputs, y), slice(place, place + 1))) for place in range(2)]
                return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-6, equal_nan=True)
            except Exception:  # a loss may raise anything for one example, or for a part of the outputs
                return False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, without gradients; afterwards it trains as before, if it did."""
        training = self.model.training
        try:
            with torch.no_grad():
                yield self.model.eval()
        finally:
            self.model.train(training)

    @functools.cached_property
    def has_tensor_pairs(self) -> bool:
        """Whether a client's inputs and targets are one tensor each."""
        return all(isinstance(part, torch.Tensor) for part in self.clients[next(iter(self.clients))])

    def losses(self, outputs: Any, targets: Tree) -> Tensor:
        """Return the loss of each example `[B]`, or the mean `[]` if the loss function returns only that."""
        values = self.loss(outputs, targets)
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return copies of the model's current parameters `[d]` and buffers `[b]` (None if it has none)."""
        buffers = self.buffer_layout
        return self.layout.read(self.model), None if buffers is None else buffers.read(self.model)

    @functools.cached_property
    def compiled(self) -> dict[tuple[Any, ...], Step]:
        """The steps that were compiled for this problem, by the shapes and strides of their inputs."""
        return {}

    @functools.cached_property
    def _places(self) -> list[tuple[nn.Module, str]]:
        """The modules and names of the tensors of both layouts.

        Finding them by name would take longer than a small copy. The tensors themselves are not kept, because a copy of
        the problem or an assignment may replace them.
        """
        layouts = [self.layout, *([self.buffer_layout] if self.buffer_layout else [])]
        paths = [name.rpartition(".") for layout in layouts for name in layout.names]
        return [(self.model.get_submodule(module), name) for module, _, name in paths]

    def load(self, x: Tensor, buffers: Tensor | None) -> nn.Module:
        """Write parameters `[d]` and buffers `[b]` (None leaves them unchanged) into the model, and return it."""
        parts = list(self.layout.split(x).values())
        if buffers is not None and self.buffer_layout is not None:
            parts += self.buffer_layout.split(buffers).values()
        for (module, name), part in zip(self._places, parts, strict=False):
            getattr(module, name).detach().copy_(part)
        return self.model

    @functools.cached_property
    def at_home(self) -> dict[str, Tensor]:
        """The buffers that do not travel, mostly integers, as they were before any training."""
        travelling = self.buffer_layout.names if self.buffer_layout else ()
        return {name: b.clone() for name, b in self.model.named_buffers() if name not in travelling}

    def rewind(self) -> None:
        """Reset buffers that do not travel to their initial values, so that no client starts with another's."""
        if self.at_home:
            now = dict(self.model.named_buffers())
            for name, value in self.at_home.items():
                now[name].copy_(value)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The precision in which the model trains: the widest one of its parameters."""
        return functools.reduce(torch.promote_types, (p.dtype for p in self.model.parameters() if p.requires_grad))

    @functools.cached_property
    def sum_dtype(self) -> torch.dtype:
        """The precision of sums over the steps of a round: in half precision, a large one would stand still."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return next(self.model.parameters()).device

    def examples_of(self, client: int) -> Examples:
        """Return a client's inputs and targets on the model's device; refuses an empty client."""
        x, y = self.clients[client]
        if size(x) != size(y) or size(x) == 0:
            raise UpdateError(
                f"client {client} has {size(x)} inputs and {size(y)} targets; give at least one input, and one target "
                "for each"
            )
        moved: Examples = map_tensors(lambda part: part.to(self.device), (x, y))
        return moved

    def pool(self, cohort: Sequence[int]) -> Pool:
        """Return the examples of these clients on the model's device; a data set already there is not copied."""
        held = self.clients
        if isinstance(held, Shards) and held.x.device == self.device:
            return Pool(held.x, held.y, [held.places(client) for client in cohort])
        parts = [self.examples_of(client) for client in cohort]
        ends = np.cumsum([size(x) for x, _ in parts])
        try:
            x, y = concatenate(parts)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            who = ", ".join(map(str, cohort))
            fix = "give all clients examples of one form, or use engine=loop"
            raise SpecError(f"the examples of clients {who} differ in form ({error}); {fix}") from None
        return Pool(x, y, np.split(np.arange(ends[-1]), ends[:-1]))

    def draws(self, examples: int, seed: int, round: int, client: int) -> Tensor | None:
        """Return the augmentation draws for every example that a client sees in a round, in order; None without any."""
        if self.augment is None:
            return None
        return self.augment.draw(generator(seed, "augment", round, client), examples).to(self.device)

    @contextlib.contextmanager
    def naming(self, clients: Iterable[int]) -> Iterator[None]:
        """Name the clients in the error of a layer that refuses their batch, as batch-norm refuses a single value."""
        try:
            yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            ids = getattr(self.clients, "given", {})  # as their owner calls them
            who = ", ".join(str(ids.get(client, client)) for client in clients)
            fix = "set drop_last=true or another batch size, and leave out clients with one example"
            raise UpdateError(f"client {who}: {error}; {fix}") from None

    def inputs(self, x: Tree, draws: Tensor | None) -> Tree:
        """Return raw inputs `[B, ...]` augmented by these draws and prepared for the model."""
        return self.prepare(x if draws is None or self.augment is None else self.augment.apply(x, draws))


def _mixes_examples(module: nn.Module) -> bool:
    """Return whether what a layer computes for an example, or keeps after a batch, depends on the whole batch.

    Instance-norm normalises each example alone, but keeps running statistics of batches if it is told to.
    """
    is_batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    return is_batch_norm or bool(getattr(module, "track_running_stats", False))
