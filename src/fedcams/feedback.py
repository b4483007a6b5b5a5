"""Error feedback: what compression loses in one round is sent in a later round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.compress import Code, Compressor, compressor
from fedcams.errors import LayoutError, SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.rows import RowStore

if TYPE_CHECKING:
    from torch import Tensor

Encoded = tuple[Code, "Tensor | None", "Tensor | None"]


def encode_with_feedback_(
    codec: Compressor, layout: Layout, h: Tensor, keys: int | Sequence[int], keep: bool, measure: bool = False
) -> Encoded:
    """Encode rows with error feedback; `h` is overwritten with what remains to be sent.

    Arguments:
        codec: the compressor.
        layout: the layout of a row.
        h: the rows `[C, d]`: updates plus residuals.
        keys: seeds the codec: one integer, or one per row.
        keep: whether to return the residual.
        measure: whether to return the relative errors, which reads h two more times.

    Returns:
        The code, the residual h - C(h) `[C, d]`, computed from exactly what the receiver decodes, or None, and the
        errors ‖C(h)-h‖/‖h‖ `[C]` or None.

    Raises:
        UpdateError: for an h that is not finite.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.feedback import encode_with_feedback_
        >>> h = torch.tensor([[0.5, -2.0, 0.0]])
        >>> topk = fedcams.compressor("topk(k=1)")
        >>> code, residual, _ = encode_with_feedback_(topk, fedcams.Layout.flat(3), h, 0, keep=True)
        >>> residual
        tensor([[0.5000, 0.0000, 0.0000]])
    """
    code = codec.encode(h, layout, keys)
    norms = h.norm(dim=-1) if measure else None
    if keep or measure:
        codec.add_to_(h, code, layout, weight=-1.0)
    errors = None if norms is None else h.norm(dim=-1) / norms.clamp(min=torch.finfo(torch.float32).tiny)
    return code, h if keep else None, errors


@dataclass(frozen=True)
class Pending:
    """Updates that are encoded but not yet accepted: the code to send, and the residual to keep once they are."""

    ids: tuple[int, ...]
    round: int
    code: Code
    residual: Tensor | None
    """`[C, d]`, in the memory of the update that it came from; None if there is nothing to keep."""


class ErrorFeedback:
    """Error feedback for your own training loop: `h = delta + e; code = C(h); e' = h - decode(code)`.

    The residual e changes only when the server accepts the update. At any time, what the server has accepted plus
    the residual therefore equals the sum of the client's own updates in accepted rounds.

    Arguments:
        codec: the compressor, or its spec string.
        rows: the store that keeps the residuals.
        row: the name of the residuals in that store.

    Raises:
        SpecError: for a compressor without an error bound, and for a name that the store does not have.

    Examples:
        >>> import fedcams, torch
        >>> rows = fedcams.RowStore.in_memory({"residual": fedcams.Layout.flat(3)})
        >>> uplink = fedcams.ErrorFeedback("topk(k=1)", rows)
        >>> pending = uplink.prepare_([0], torch.tensor([[0.5, 2.0, 0.25]]), round=1)
        >>> uplink.commit(pending)  # the server has accepted the 2.0
        >>> rows.gather("residual", [0])
        tensor([[0.5000, 0.0000, 0.2500]])
    """

    def __init__(self, codec: Compressor | str, rows: RowStore, row: str = "residual") -> None:
        """Encode with `codec`, and keep residuals in `rows` under the name `row`.

        Refuses a compressor without an error bound, and a name that the store does not have.
        """
        self.compressor, self.rows, self.row = compressor(codec), rows, row
        if row not in rows.layouts:
            raise SpecError(f"row={row!r}: the store has {', '.join(rows.layouts)}; give one of these names")
        self.layout = rows.layouts[row]
        if self.compressor.squared_error_bound(self.layout) is None:
            raise SpecError(
                f"{self.compressor} has no bound on its error, which would grow without limit under error feedback; "
                "choose a contractive compressor"
            )

    def prepare_(self, ids: Sequence[int], delta: Tensor, round: int, key: int | Sequence[int] = 0) -> Pending:
        """Encode the updates `delta [C, d]` of these clients; return what to send and what to keep once it is accepted.

        Overwrites `delta` with h and then with the new residual. `key` seeds the codec: one integer, or one per row.
        Refuses an id that appears twice, and a delta of another shape, not contiguous or not finite.
        """
        if delta.dim() != 2 or len(delta) != len(ids):
            raise LayoutError(f"delta has shape {tuple(delta.shape)} for {len(ids)} clients; give [{len(ids)}, d]")
        delta = delta.detach()
        if not delta.is_contiguous():
            raise LayoutError("delta is not contiguous, and is overwritten; give delta.contiguous()")
        if len(set(ids)) != len(ids):
            raise UpdateError(f"ids={list(ids)}: a client appears twice; one update per client and round")
        self.rows.add_to_(self.row, ids, delta)
        code, residual, _ = encode_with_feedback_(self.compressor, self.layout, delta, key, keep=True)
        return Pending(tuple(ids), round, code, residual)

    def commit(self, pending: Pending) -> None:
        """Store the residuals of updates that the server accepted. Do not call it for updates that were refused."""
        if pending.residual is not None:
            self.rows.commit(pending.ids, {self.row: pending.residual}, pending.round)
