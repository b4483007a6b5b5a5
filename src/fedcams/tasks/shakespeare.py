"""Shakespeare's plays: predict the next character of what a role says; each role is one client."""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.errors import DataError, first_line
from fedcams.registry import integer, register
from fedcams.tasks.base import Task, TaskData, data_folder

if TYPE_CHECKING:
    from torch import Tensor

CHARACTERS = "\n !\"#$%&'()*,-./0123456789:;?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
"""The vocabulary, fixed so that a model fits every selection of plays; class 0 stands for all other characters."""
FOLDER, ARCHIVE = "shakespeare", "plays.zip"
SOURCE = "https://github.com/martin-gorner/tensorflow-rnn-shakespeare"
TRAINED = 0.8
"""The part of a role's sequences that is for training."""

Speech = tuple[str, str]
"""A role, and a line that it says."""
Sequences = NDArray[np.int64]
"""`[n, length + 1]`: the first `length` characters are the inputs, the last `length` the targets."""


@register("shakespeare")
@dataclass(frozen=True)
class Shakespeare(Task):
    """Predicts the next character in sequences of 80 from the plays; for `natural`, each role of a play is a group.

    A role's text, in the order of the play, is cut into consecutive sequences; the remainder is left out. The first
    80% of a role's sequences are for training and the rest for testing, so a role needs at least two. Loss and
    accuracy are means over characters.
    """

    roles: int | None = integer(None, low=1, doc="use only this many roles, those with the most text; none: all")
    length: int = integer(80, low=1, doc="characters per sequence")

    reference = "Caldas et al., LEAF: A Benchmark for Federated Settings, 2018; Reddi et al., ICLR 2021"
    model = "lstm"
    examples = ("shakespeare", "shakespeare(roles=3, length=20)")
    refused = (
        ("shakespeare(roles=0)", r"allowed: an integer in \[1, inf\)"),
        ("shakespeare(plays=2)", "shakespeare has no key 'plays'"),
    )

    def load(self, folder: Path | None = None) -> TaskData:
        roles = self._chosen(sequences(read_plays(data_folder(folder) / FOLDER), self.length))
        cuts = [int(TRAINED * len(each)) for each in roles]
        train = torch.from_numpy(np.concatenate([each[:cut] for each, cut in zip(roles, cuts, strict=True)]))
        test = torch.from_numpy(np.concatenate([each[cut:] for each, cut in zip(roles, cuts, strict=True)]))
        return TaskData(
            *(train[:, :-1].contiguous(), train[:, 1:].contiguous()),
            *(test[:, :-1].contiguous(), test[:, 1:].contiguous()),
            classes=1 + len(CHARACTERS),
            loss=character_loss,
            metric=character_accuracy,
            groups=torch.repeat_interleave(torch.tensor(cuts)),
        )

    def _chosen(self, roles: list[Sequences]) -> list[Sequences]:
        """Return the roles with most text, in the order of the plays; refuses to choose more than there are."""
        wanted = self.roles or len(roles)
        if not 0 < wanted <= len(roles):
            raise DataError(
                f"{self}: the plays have {len(roles)} roles with at least 2 sequences of {self.length} characters; "
                "give roles= at most that many, or more plays"
            )
        most = sorted(range(len(roles)), key=lambda i: -len(roles[i]))[:wanted]
        return [roles[i] for i in sorted(most)]


def character_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the characters of each sequence: `[n, T, V]` and `[n, T]` -> `[n]`."""
    return torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").mean(-1)


def character_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the part of each sequence's characters that is predicted: `[n, T, V]` and `[n, T]` -> `[n]`."""
    return (outputs.argmax(-1) == targets).float().mean(-1)


# -- plays -----------------------------------------------------------------------------------------------------------

DIRECTION = re.compile(r"\[[^]]*(?:]|\Z)")
"""A stage direction; where a bracket is not closed, it ends with its paragraph."""
HEADING = re.compile(r"(ACT|SCENE|INDUCTION|PROLOGUE|EPILOGUE)\b")


def read_plays(folder: Path) -> dict[str, str]:
    """Return the text of each play by name: the `.txt` files of a folder, and those in its `plays.zip`."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.txt")}
    try:
        if (folder / ARCHIVE).is_file():
            with zipfile.ZipFile(folder / ARCHIVE) as archive:
                found |= {name: archive.read(name) for name in archive.namelist() if name.endswith(".txt")}
    except Exception as error:  # a damaged archive can raise anything
        raise DataError(f"{folder / ARCHIVE} cannot be read: {first_line(error)}; download it again") from error
    if not found:
        raise DataError(
            f"shakespeare: {folder} has no plays; put {ARCHIVE} or its .txt files there, from {SOURCE} "
            "(a role's name and a tab before what it says), or name another folder with --data DIR or FEDCAMS_DATA=DIR"
        )
    return {name: found[name].decode("utf-8", errors="replace") for name in sorted(found)}


def sequences(plays: dict[str, str], length: int) -> list[Sequences]:
    """Return what each role of each play says, cut into sequences; roles with fewer than 2 are left out."""
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    for play, text in plays.items():
        for role, line in speeches(text):
            said[play, role].append(line + "\n")
    encoded = (encode("".join(lines)) for lines in said.values())
    return [cut for each in encoded if len(cut := _windows(each, length)) >= 2]


def speeches(play: str) -> Iterator[Speech]:
    """Yield each line of a play with the role that says it; the cast, headings and stage directions are left out.

    A role's name stands before a tab, perhaps continued from the line before; its further lines begin with a tab.
    """
    paragraphs = re.split(r"\n\s*\n", play.replace("\r\n", "\n").strip("\n"))
    first = next((i for i, each in enumerate(paragraphs) if HEADING.match(each)), 0)  # after the cast
    role = ""
    for paragraph in paragraphs[first:]:
        if HEADING.match(paragraph):
            role = ""
            continue
        before = ""
        for line in DIRECTION.sub("", paragraph).split("\n"):
            name, tab, words = line.partition("\t")
            role = f"{before} {name}".strip() if tab and name.strip() else role
            before = "" if tab else name
            if tab and role and words.strip():
                yield role, " ".join(words.split())


def encode(text: str) -> NDArray[np.int64]:
    """Return the class of each character, `[len(text)]`."""
    classes = {character: place for place, character in enumerate(CHARACTERS, 1)}
    return np.array([classes.get(character, 0) for character in text], dtype=np.int64)


def _windows(text: NDArray[np.int64], length: int) -> Sequences:
    """Return sequences `[n, length + 1]` that follow each other; each begins with the last target of the one before."""
    starts = np.arange(0, len(text) - length, length)
    cut: Sequences = text[starts[:, None] + np.arange(length + 1)]
    return cut
