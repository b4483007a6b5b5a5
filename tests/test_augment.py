"""Crops and flips: equal to a loop that pads, crops and mirrors one image at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcams.errors import SpecError
from fedcams.tasks import CropFlip
from together import together

SHAPES = [(3, 32, 32), (1, 8, 8), (2, 5, 7)]


def slow(x: Tensor, draws: Tensor, padding: int) -> Tensor:
    """As torchvision's RandomCrop and RandomHorizontalFlip do it to pictures."""
    changed = []
    for image, (top, left, flip) in zip(x.numpy(), draws.tolist(), strict=True):
        height, width = image.shape[1:]
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        crop = padded[:, top : top + height, left : left + width]
        changed.append(crop[:, :, ::-1] if flip else crop)
    return torch.from_numpy(np.stack(changed))


def images(n: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    pixels = np.random.default_rng(n).integers(1, 256, size=(n, *shape))  # none is black, as the border is
    return torch.from_numpy(pixels).to(dtype)


def every_draw(padding: int) -> Tensor:
    offsets = range(2 * padding + 1)
    return torch.tensor(list(itertools.product(offsets, offsets, (0, 1))))


@together("dtype", [torch.uint8, torch.float32])
@together("padding", [0, 1, 4])
@together("shape", SHAPES, ids=str)
def test_apply_is_the_loop(shape: tuple[int, ...], padding: int, dtype: torch.dtype) -> None:
    draws = every_draw(padding)
    x = images(len(draws), shape, dtype)
    before = x.clone()
    changed = CropFlip(padding).apply(x, draws)
    assert changed.dtype == dtype
    assert torch.equal(changed, slow(x, draws, padding))
    assert torch.equal(x, before)


def test_the_middle_without_a_flip_is_the_image() -> None:
    x = images(3, (3, 32, 32))
    assert torch.equal(CropFlip().apply(x, torch.tensor([[4, 4, 0]] * 3)), x)


def test_a_leading_axis_is_a_loop_over_it_and_so_is_vmap() -> None:
    augment, x = CropFlip(2), images(12, (3, 8, 8)).view(3, 4, 3, 8, 8)
    draws = augment.draw(np.random.default_rng(0), 12).view(3, 4, 3)
    one_by_one = torch.stack([augment.apply(*pair) for pair in zip(x, draws, strict=True)])
    assert torch.equal(augment.apply(x, draws), one_by_one)
    assert torch.equal(torch.vmap(augment.apply)(x, draws), one_by_one)


def test_draws_cover_their_range_evenly_and_follow_the_generator() -> None:
    draws = CropFlip(4).draw(np.random.default_rng(1), 9000)
    assert draws.dtype == torch.int64
    for column, sides in enumerate((9, 9, 2)):
        counts = draws[:, column].bincount(minlength=sides).double()
        assert len(counts) == sides
        expected = 9000 / sides
        assert float((counts - expected).abs().max()) < 5 * expected**0.5
    assert torch.equal(draws, CropFlip(4).draw(np.random.default_rng(1), 9000))
    assert not torch.equal(draws, CropFlip(4).draw(np.random.default_rng(2), 9000))


def test_negative_padding_is_refused() -> None:
    with pytest.raises(SpecError, match="padding=-1; give 0 or more"):
        CropFlip(-1)


def test_no_example_and_no_padding() -> None:
    assert CropFlip().apply(images(0, (3, 8, 8)), CropFlip().draw(np.random.default_rng(0), 0)).shape == (0, 3, 8, 8)
    assert int(CropFlip(0).draw(np.random.default_rng(0), 50)[:, :2].max()) == 0
