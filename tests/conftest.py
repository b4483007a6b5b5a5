"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# The first call of a kernel compiles it, so a deadline would measure that; in CI the same examples every time.
settings.register_profile("fedcams", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedcams")
