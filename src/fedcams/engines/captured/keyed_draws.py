"""Random layers as functions of a key: what dropout draws depends only on the client and the step.

A generator would not do: its state on the host or the device would be shared by streams and replayed graphs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedcams.errors import SpecError


class FusedDropout(SpecError):
    """A fused attention kernel draws from a generator; attention computed step by step draws from the key."""


_WORD = 0xFFFFFFFF
_aten = torch.ops.aten


def key_words(key: int) -> list[int]:
    """Return the two 32-bit words of a key and a step count of zero: the content of the tensor that draws read."""
    return [key & _WORD, key >> 32 & _WORD, 0]


@contextlib.contextmanager
def keyed_draws(words: Tensor) -> Iterator[Callable[[], None]]:
    """Make random operations inside draw from `words [3]`, int64: two of a key, and the number of the step.

    Yields a function that ends the drawing: an operation that draws later is refused, because a second pass over a
    layer would draw different numbers. Operations without a keyed form are refused too, and fused attention with
    dropout raises `FusedDropout`.
    """
    draws = _KeyedDraws(words)
    with draws:
        yield draws.close


class _KeyedDraws(TorchDispatchMode):
    """Replaces a generator's numbers with those made from a key."""

    def __init__(self, words: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.words, self.count, self.closed = words, 0, False

    def close(self) -> None:
        self.closed = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _never_draws(func, args, named):
            return func(*args, **named)
        if self.closed:
            raise SpecError(f"the model draws random numbers in its backward pass ({func}); use engine=loop")
        if "scaled_dot_product" in func.name():
            raise FusedDropout(f"attention applies dropout in the fused {func}; use engine=loop")
        if func not in _KEYED:
            raise SpecError(f"the model draws random numbers with {func}, which takes no key; use engine=loop")
        named.pop("generator", None)
        return _KEYED[func](self.uniform, *args, **named)

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers in (0, 1) of this shape, float32, the next of this step."""
        self.count += 1
        place = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
        stream = _mixed(self.words[2] * 0x9E3779B9 + self.count * 0x85EBCA6B & _WORD)
        mixed = _mixed(_mixed(place & _WORD ^ self.words[0]) + self.words[1] & _WORD ^ stream)
        return ((mixed >> 8).float() + 0.5).mul(2.0**-24).view(like.shape)


def _never_draws(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether an operation is called with a dropout of zero, as in most attention and recurrent layers."""
    places = [i for i, each in enumerate(func._schema.arguments) if each.name in ("dropout_p", "dropout")]
    values = [named.get(func._schema.arguments[i].name, args[i] if i < len(args) else 0.0) for i in places]
    return bool(values) and not any(values)


def _mixed(value: Tensor) -> Tensor:
    """Return 32-bit hashes of 32-bit integers in int64 (the constants are those of lowbias32)."""
    value = (value ^ value >> 16) * 0x7FEB352D & _WORD
    value = (value ^ value >> 15) * 0x846CA68B & _WORD
    return value ^ value >> 16


# -- operations with a key: the first argument gives uniform numbers, the others are the operation's own ---------------

Uniform = Callable[[Tensor], Tensor]


def _dropout(uniform: Uniform, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    kept = uniform(x) >= (p if train or train is None else 0.0)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _bernoulli_(uniform: Uniform, x: Tensor, p: Any = 0.5) -> Tensor:
    return x.copy_(uniform(x) < p)


def _bernoulli(uniform: Uniform, x: Tensor, p: Any = None) -> Tensor:
    return (uniform(x) < (x if p is None else p)).to(x.dtype)


def _uniform_(uniform: Uniform, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(low + (high - low) * uniform(x))


def _normal_(uniform: Uniform, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    radius, angle = (-2 * uniform(x).log()).sqrt(), 2 * math.pi * uniform(x)
    return x.copy_(mean + std * radius * angle.cos())


def _rand(uniform: Uniform, size: Sequence[int], **options: Any) -> Tensor:
    return _uniform_(uniform, torch.empty(size, **options))


def _randn(uniform: Uniform, size: Sequence[int], **options: Any) -> Tensor:
    return _normal_(uniform, torch.empty(size, **options))


def _rand_like(uniform: Uniform, x: Tensor, **options: Any) -> Tensor:
    return _uniform_(uniform, torch.empty_like(x, **options))


def _randn_like(uniform: Uniform, x: Tensor, **options: Any) -> Tensor:
    return _normal_(uniform, torch.empty_like(x, **options))


_KEYED: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli_.Tensor: _bernoulli_,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.uniform_.default: _uniform_,
    _aten.normal_.default: _normal_,
    _aten.rand.default: _rand,
    _aten.randn.default: _randn,
    _aten.rand_like.default: _rand_like,
    _aten.randn_like.default: _randn_like,
}
