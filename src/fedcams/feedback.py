"""Error feedback: what compression loses this time is sent next time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcams.compress import Code, Compressor, compressor
from fedcams.errors import LayoutError, SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.residuals import ResidualStore


@dataclass(frozen=True)
class Pending:
    """Updates that were encoded and not yet accepted: the code to send and the residual to keep if they are."""

    ids: tuple[int, ...]
    round: int
    code: Code
    residual: Tensor | None
    """`[C, d]`, in the memory of the update it came from; None when there is nothing to keep."""
    error: Tensor | None = None
    """`[C]`, the relative compression error ‖C(h)-h‖/‖h‖, where it was asked for; zero for h = 0."""


class ErrorFeedback:
    """`h = delta + e; code = C(h); e' = h - decode(code)`, where e changes only when the server accepted the update.

    The residual is computed from exactly what the receiver decodes, so at any time the updates accepted so far plus
    the residual are the sum of the client's own updates in accepted rounds. Give `store=None` and a layout to send
    without feedback.
    """

    def __init__(self, codec: Compressor | str, store: ResidualStore | None, layout: Layout | None = None) -> None:
        self.compressor = compressor(codec)
        if store is not None and layout is not None and store.layout.id != layout.id:
            theirs, ours = (f"{one.id.hex()} with d={one.d}" for one in (store.layout, layout))
            raise LayoutError(
                f"the store holds residuals of layout {theirs}, the model's is {ours}; give one made for it"
            )
        layout = layout if store is None else store.layout
        if layout is None:
            raise SpecError("store=None: give a ResidualStore, or a layout to send without error feedback")
        self.layout = layout
        bound = self.compressor.squared_error_bound(self.layout)
        if store is not None and bound is None:
            raise SpecError(
                f"{self.compressor} has no contraction, its error would grow without end under error feedback; "
                "choose a contractive compressor or send without feedback (store=None)"
            )
        self.store = None if bound == 0.0 else store  # a lossless compressor leaves nothing behind

    def prepare(
        self, ids: Sequence[int], delta: Tensor, round: int, key: int | Sequence[int] = 0, measure: bool = False
    ) -> Pending:
        """Encodes the updates `delta [C, d]` of these clients. Consumes delta: h and e' are formed in its memory.

        With `measure` the relative compression error is recorded too, which reads h and e' once more.
        """
        if delta.dim() != 2 or len(delta) != len(ids):
            raise LayoutError(f"delta has shape {tuple(delta.shape)} for {len(ids)} clients; give [{len(ids)}, d]")
        delta = delta.detach()
        if not delta.is_contiguous():
            raise LayoutError("delta is not one block of memory, and h is formed in it; give delta.contiguous()")
        if len(set(ids)) != len(ids):
            raise UpdateError(f"ids={list(ids)}: a client stands twice; one update a client and round")
        if self.store is not None:
            self.store.add_to(ids, delta)
        code = self.compressor.encode(delta, self.layout, key)
        norms = delta.norm(dim=-1) if measure else None
        if self.store is not None or measure:
            self.compressor.add_to(delta, code, self.layout, weight=-1.0)
        error = None if norms is None else delta.norm(dim=-1) / norms.clamp(min=torch.finfo(torch.float32).tiny)
        return Pending(tuple(ids), round, code, None if self.store is None else delta, error)

    def commit(self, pending: Pending) -> None:
        """The updates were accepted: their residuals replace the stored ones."""
        if self.store is not None and pending.residual is not None:
            self.store.commit(pending.ids, pending.residual, pending.round)

    def discard(self, pending: Pending) -> None:
        """The updates were not accepted: the stored residuals stay as they are."""


class DurableFeedback(ErrorFeedback):
    """The same for a client whose process may end between its reply and the server's word on it.

    `hold` stores the new residual next to the old one; `commit` and `discard` choose between the two, and need of the
    pending update only its round. The store must outlive the process and belong to this client alone, since it is its
    snapshot that says which residual counts.
    """

    def hold(self, pending: Pending) -> None:
        """Makes the residual last, to be committed or discarded by whatever process comes next."""
        super().commit(pending)

    def commit(self, pending: Pending) -> None:
        """The held residual is the one to go on with."""
        if self.store is not None:
            self.store.snapshot(pending.round)

    def discard(self, pending: Pending | None = None) -> None:
        """The one before it is, also where a process died before it could say what it held."""
        if self.store is not None:
            self.store.rollback(self.store.snapshot_round or 0)
