"""The key of one site's noise, and how often the site has answered with it.

<folder>/noise.json   the key, the number of answers, the length of the run if the noise depends on it, and a digest of
                      all this; readable by its owner alone

The key comes from the operating system when the site first takes part in a run, and never leaves the site. Every answer
is counted on disk before it is trained, so that a kill counts it too often rather than not at all. Noise that spreads
an epsilon over the run is less the shorter the run is, so a server must not lengthen the run as it goes on.
"""

from __future__ import annotations

from pathlib import Path

from fedcams.durable import os_errors, private_folder, sealed, unsealed, write_whole
from fedcams.errors import ResidualError, UpdateError
from fedcams.privacy.secret import new_key

FILE = "noise.json"
UNKNOWN = "so it is unknown what this site has spent; take part under another run name"


class SiteSecret:
    """The file with a site's key; only one process may use it at a time."""

    def __init__(self, folder: Path, fixed: int | None = None, known: bool = False) -> None:
        """Open the file in this folder, or make it; refuses a damaged one, and one that is lost.

        `fixed` is the length of the run if the noise depends on it; refuses another one than before. `known` says that
        the site took part before, so the file must be there.
        """
        self.path = folder / FILE
        if not self.path.exists():
            if known:
                raise ResidualError(f"{self.path}: missing, {UNKNOWN}")
            with os_errors(ResidualError, "make the folder", folder):
                private_folder(folder)
            self._write(new_key(), 0, fixed)
        self.key, self.answers, self.fixed = self._read()
        if fixed != self.fixed:
            raise UpdateError(
                f"{self.path}: the noise of this site was for a run of {self.fixed or 'any number of'} rounds, but the "
                f"server now says {fixed or 'any number'}; continue as before, or under another run name"
            )

    def spend(self, rounds: int | None) -> None:
        """Count one more answer; refuses more of them than the run has rounds, for which its ε was stated."""
        if rounds is not None and self.answers >= rounds:
            raise UpdateError(
                f"this site has answered {self.answers} times in a run of {rounds} rounds; another answer would spend "
                "more privacy than the run states"
            )
        self._write(self.key, self.answers + 1, self.fixed)
        self.answers += 1

    def _write(self, key: str, answers: int, fixed: int | None) -> None:
        with os_errors(ResidualError, "write", self.path):
            write_whole(self.path, sealed({"key": key, "answers": answers, "rounds": fixed}))

    def _read(self) -> tuple[str, int, int | None]:
        with os_errors(ResidualError, "read", self.path):
            values = unsealed(self.path.read_bytes())
        if values is None or values.keys() != {"key", "answers", "rounds"}:
            raise ResidualError(f"{self.path}: damaged, {UNKNOWN}")
        fixed = values["rounds"]
        return str(values["key"]), int(values["answers"]), None if fixed is None else int(fixed)
