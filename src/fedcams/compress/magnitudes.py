"""Checks of the magnitudes that kept coordinates share, for readers of payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedcams.errors import BadMagnitude, LayoutMismatch, NonCanonical

if TYPE_CHECKING:
    from torch import Tensor


def check_magnitudes(magnitudes: Tensor, counts: Tensor) -> None:
    """Refuse magnitudes `[n]` that no encoder writes; `counts [n]` says how many coordinates share each of them.

    There must be one per count, none below zero. -0.0, and anything but +0.0 where the count is zero, is refused too:
    it would be a second way to encode the same vector.
    """
    if magnitudes.shape != counts.shape:
        raise LayoutMismatch(f"field 'magnitude' has {magnitudes.numel()} numbers; the layout needs {counts.numel()}")
    sizes = magnitudes.numpy()
    if (sizes < 0).any():
        raise BadMagnitude(f"field 'magnitude': {sizes.min()} is negative; allowed: 0 or more")
    if (np.signbit(sizes) | ((counts.numpy() == 0) & (sizes != 0))).any():
        raise NonCanonical("field 'magnitude': -0.0, or a number other than 0 where nothing is kept; write +0.0")
