"""Whether the server of a run adapted at all, in one line."""

from __future__ import annotations

from fedcams.runs.folder import Run

RARELY = 0.01
"""A server adapts too little to matter if fewer coordinates than this leave the floor."""


def floor_note(run: Run) -> str | None:
    """Return a sentence for a run whose adaptive server never adapted; None if it did, or if that is not known.

    It names the `fedavgm` with the same steps.
    """
    shares = [share for record in run.records if (share := record.probes.get("off_floor")) is not None]
    twin = run.experiment.server.twin(digits=3)
    if not shares or twin is None or max(shares) >= RARELY:
        return None
    kept = f"{100 * (1 - max(shares)):.6g}"
    return f"v̂ stayed on its floor in {kept} % of coordinates: this run is {twin}"
