"""The server's state on disk: the progress of a run, and what happened to every update.

<checkpoint>/run.json      what defines the run, the name under which clients keep its rows, and a digest of all this
<checkpoint>/state.json, <round>.safetensors, spare.safetensors, replicas/   see `fedcams.runs.checkpoint`
<checkpoint>/ledger.jsonl  one line per round, without times: the clients that were asked, accepted (with the digest of
                           the update), refused (with the reason) or did not answer
<checkpoint>/replies/      replies of the round in progress

A round counts once `state.json` names it. Its line, tensors and replicas are on disk by then, and only then do
instructions tell clients that their updates were accepted. Replicas newer than the last such round are rolled back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcams.durable import OWNER_ONLY, sealed
from fedcams.rounds import Server, ServerState
from fedcams.rows import DirectRows
from fedcams.runs.checkpoint import (
    LAST_READER,
    REPLICAS,
    STATE,
    Checkpoint,
    differences,
    old_format,
    read_sealed,
)
from fedcams.runs.files import Lines, disk_errors, end_of, write_private
from fedcams.runs.folder import RunError

RUN, LEDGER, REPLIES = "run.json", "ledger.jsonl", "replies"
VERSION = 2
RESTORE = "restore it, or give another checkpoint folder"


class FlowerCheckpoint:
    """The checkpoint folder of one run; the caller has locked it, see `fedcams.runs.files.locked`."""

    def __init__(self, folder: Path, run: str, identity: Mapping[str, Any], server: Server) -> None:
        """Describe the checkpoint of the run that `identify` found or began in this folder."""
        self.folder, self.run, self.server = folder, run, server
        rows = {} if server.replicas is None else {REPLICAS: DirectRows(server.replicas)}
        self._checkpoint = Checkpoint(folder, server, {"run": run, **identity}, rows, keep_spare=True)
        self._ledger: Lines | None = None

    def load(self, start: ServerState) -> ServerState:
        """Return the state to continue from, in the memory of `start`; `start` itself if no round was finished."""
        state = self._checkpoint.load(start)
        self._ledger = Lines(self.folder / LEDGER, state.round, self._checkpoint.lines, OWNER_ONLY)
        return state

    def save(self, state: ServerState, line: Mapping[str, Any]) -> None:
        """Save the state after a round, and the round's line in the ledger; from then on, the round counts."""
        assert self._ledger is not None, "load comes first"
        self._ledger.append(json.dumps(line))
        self._ledger.sync()
        self._checkpoint.save(state, self._ledger.digest)

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()


def identify(folder: Path, name: str, identity: Mapping[str, Any]) -> str:
    """Return the name under which clients keep the rows of the run in this folder; begin the run if there is none.

    `identity` is what must not change during the run. Refuses a run with another identity or of an older version, and
    a damaged file.
    """
    path, identity = folder / RUN, {"fedcams_flower": VERSION, "name": name, **identity}
    if not path.exists():
        # a new run with an old name must not use the residuals that clients still have from the old run
        run = f"{name}-{secrets.token_hex(4)}"
        write_private(path, sealed({**identity, "run": run}))
        return run
    _refuse_old(path)
    known = read_sealed(path, RESTORE) or {}
    if found := differences(identity, {key: value for key, value in known.items() if key != "run"}):
        raise RunError(f"{path} belongs to another run: {found}; give its settings, or another checkpoint folder")
    return str(known["run"])


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ledger, without those that are cut short or of a round that does not count yet."""
    _refuse_old(folder / RUN)
    values = read_sealed(folder / STATE, RESTORE)
    if values is None:
        return []
    end = end_of(folder / LEDGER, values["round"], values.get("lines", ""))
    return [json.loads(line) for line in (folder / LEDGER).read_bytes()[:end].splitlines()]


def _refuse_old(path: Path) -> None:
    """Refuse a run of another version. Runs of 0.1 have no digest; damage is detected later, when the file is read."""
    if not path.exists():
        return
    with disk_errors("read", path, RESTORE):
        data = path.read_bytes()
    try:
        values = dict(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return
    version, whole = values.get("fedcams_flower"), "digest" not in values or read_sealed(path, RESTORE) is not None
    if whole and version in LAST_READER:
        fix = "finish the run with it, or give another checkpoint folder"
        raise RunError(f"{path}: {old_format(version, VERSION)}; {fix}")
