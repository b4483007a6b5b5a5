"""Every compressor in a downlink, as in `test_methods`, in those that it leaves out."""

from __future__ import annotations

from test_methods import HALF, QUARTER, check_downlink
from together import together


@together("downlink", sorted({*HALF} - {*QUARTER}))
def test_downlinks_of_every_other_compressor_over_many_rounds(downlink: str) -> None:
    check_downlink(downlink)
