"""Compiled kernels are cached on disk; if that is impossible, a warning says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedcams.bits import packing
from forks import Forks

# In a process that has loaded the package before: its modules again, with what numba reads when it is imported.
AGAIN = """
import sys, numba
numba.core.config.reload_config()
for name in [name for name in sys.modules if name.partition(".")[0] == "fedcams"]:
    del sys.modules[name]
"""
CACHE = """
import os, torch
from fedcams.bits import signs
for _ in range(2):
    if not os.fork():
        signs.pack_signs(torch.ones(1, 9))
        stats = signs._pack_rows_.compiled.stats
        print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), flush=True)
        os._exit(0)
    os.wait()
"""
"""Two processes that have compiled nothing before."""


def test_compiled_kernels_are_kept_on_disk(tmp_path: Path, forks: Forks) -> None:
    done = forks.run(AGAIN + CACHE, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.output == "0 1\n1 0\n", done.errors


def test_kernels_work_without_a_folder_for_their_cache_and_say_so(tmp_path: Path, forks: Forks) -> None:
    shutil.copytree(Path(packing.__file__).parents[1], tmp_path / "fedcams", ignore=lambda *_: ["__pycache__"])
    (tmp_path / "fedcams" / "bits" / "__pycache__").touch()  # a file in its place stops even root from writing there
    code = "import torch; from fedcams.bits.vectors import abs_sum; print(abs_sum(torch.tensor([1.0, -2.0])))"
    env = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    env |= {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull}
    done = forks.run(AGAIN + code, env=env, cwd=tmp_path)
    assert done.code == 0, done.errors
    assert float(done.output) == 3.0
    assert done.errors.count("set NUMBA_CACHE_DIR") == 1
