"""The digits that come with scikit-learn: real images without a download."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedcams import keys
from fedcams.extras import load
from fedcams.registry import register
from fedcams.tasks.base import Task, TaskData, accuracy, cross_entropy


@register("digits")
@dataclass(frozen=True)
class Digits(Task):
    """Handwritten digits of 1x8x8 pixels, as floats from 0 to 1: 1437 for training and 360 for testing.

    The split is always the same: a fifth of every class is for testing, drawn with a fixed key.
    """

    reference = "Alpaydin, Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"
    model = "mlp"
    examples = ("digits",)
    refused = (("digits(classes=5)", "digits has no key 'classes'"),)

    def load(self, folder: Path | None = None) -> TaskData:
        x, y = _read()
        test = _a_fifth_of_each(y)
        train_x, test_x = torch.from_numpy(x[~test]), torch.from_numpy(x[test])
        train_y, test_y = torch.from_numpy(y[~test]), torch.from_numpy(y[test])
        return TaskData(train_x, train_y, test_x, test_y, classes=10, loss=cross_entropy, metric=accuracy)


@functools.cache  # parsing the file takes longer than a short round
def _read() -> tuple[np.ndarray, np.ndarray]:
    """float32 `[1797, 1, 8, 8]` and int64 `[1797]`."""
    if (file := _file()) is not None:
        table = np.loadtxt(file, delimiter=",")
        x, y = table[:, :-1], table[:, -1]
    else:
        datasets = load("sklearn.datasets", what="the task 'digits'", extra="tasks")
        x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)  # pixels are whole numbers up to 16


def _file() -> Path | None:
    """Return the file that `sklearn.datasets` reads, if it is in its usual place; importing that takes two seconds."""
    package = importlib.util.find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or []
    files = (Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders)
    return next((file for file in files if file.exists()), None)


def _a_fifth_of_each(y: np.ndarray) -> np.ndarray:
    """Mark every fifth example, after shuffling the examples and sorting them by class."""
    shuffled = keys.generator(0, "digits").permutation(len(y))
    grouped = shuffled[np.argsort(y[shuffled], kind="stable")]
    marked = np.zeros(len(y), dtype=bool)
    marked[grouped[::5]] = True
    return marked
