"""A read-only installation without a home folder, as in a container: a namespace with read-only mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import fedcams
from fedcams.bits.parallel import NO_CACHE
from fedcams.experiment import Experiment

MOUNTED = """
while [ "$1" != -- ]; do
    mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 125
    shift
done
shift
exec "$@"
"""
"""Makes the folders before `--` read-only for the command after it, even if that is root's."""
TINY = Experiment.from_dict(
    {"task": "logistic(size=20)", "model": "linear", "clients": 2, "sampler": "full", "rounds": 1}
)
WRITE = """
import pathlib, fedcams
for folder in (pathlib.Path.home(), pathlib.Path(fedcams.__file__).parent):
    try:
        (folder / "written").touch()
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The command that makes a namespace for mounts; skips where this user may not have one."""
    wanted = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, which only Linux has")
    tried = subprocess.run([*wanted, "mount", "--bind", "/tmp", "/tmp"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a namespace for mounts: {tried.stderr.strip()}")
    return wanted


def call(namespace: list[str], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with installation and home read-only; `folder` is where the user works."""
    home, package = folder.parent / "home", Path(fedcams.__file__).parent
    home.mkdir(exist_ok=True)
    folders = [str(each) for each in (home, package, Path(sysconfig.get_paths()["purelib"]))]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "XDG_"))}
    run = ["sh", "-c", MOUNTED, "sh", *folders, "--", sys.executable, *command]
    return subprocess.run(
        [*namespace, *run], env={**env, "HOME": str(home)}, cwd=folder, capture_output=True, text=True, check=False
    )


def test_an_installation_that_cannot_be_written_works_and_warns_once_when_it_computes(
    namespace: list[str], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "tiny.toml").write_text(TINY.to_toml())
    assert call(namespace, work, "-c", WRITE).stdout == 2 * "Read-only file system\n"
    for command, expected, warnings in ((["list", "compressor"], "topk", 0), (["run", "tiny.toml"], "rounds", 1)):
        done = call(namespace, work, "-m", "fedcams", *command)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert done.stderr.count(f"UserWarning: {NO_CACHE}") == warnings, done.stderr
    assert len(list(work.rglob("rounds.jsonl"))) == 1
