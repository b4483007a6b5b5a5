"""Build a wheel and an sdist, install each in a new environment, and use it as a new user would.

Every environment is made below `build/release`. Bare installations compute a round; those with extras run the demo; the
sdist's own tests, as far as `make test` runs them, run from its unpacked folder. `--quick` leaves these tests out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
WORK, DIST = ROOT / "build" / "release", ROOT / "dist"
EXTRAS = "tasks,report"
BARE = """
import torch, fedcams
clients = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(4)]
history = fedcams.simulate(torch.nn.Linear(4, 2), clients, clients[0], recipe="lighter", rounds=2)
assert len(list(history)) == 2
"""


class Environment:
    """A virtual environment below `build/release`, new and empty but for torch."""

    def __init__(self, name: str) -> None:
        self.folder = WORK / name
        run(sys.executable, "-m", "venv", "--clear", str(self.folder))
        (torch,) = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
        self.install(torch)

    def install(self, *wanted: str) -> None:
        """Install packages in the versions of `constraints.txt`."""
        self.run(
            "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(CONSTRAINTS), *wanted
        )

    def run(self, command: str, *arguments: str, cwd: Path = WORK) -> None:
        """Run one of its commands, in a folder that is not the repository."""
        run(str(self.folder / "bin" / command), *arguments, cwd=cwd)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command, or exit with what went wrong."""
    print("+", " ".join(command), flush=True)
    if code := subprocess.run(command, cwd=cwd).returncode:
        sys.exit(f"{' '.join(command)} failed with exit status {code}")


def build() -> tuple[Path, Path]:
    """Build both archives in `dist`, and return the wheel and the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--clear", str(WORK / "tools"))
    run(str(WORK / "tools/bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "build")
    run(str(WORK / "tools/bin/python"), "-m", "build", "--outdir", str(DIST))
    return next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))


def use(archive: Path) -> None:
    """Install an archive, bare and with extras, and use both."""
    kind = "wheel" if archive.suffix == ".whl" else "sdist"
    bare = Environment(f"{kind}-bare")
    bare.install(str(archive))
    bare.run("fedcams", "list")
    bare.run("python", "-c", BARE)
    whole = Environment(f"{kind}-extras")
    whole.install(f"{archive}[{EXTRAS}]")
    whole.run("fedcams", "run", "demo", "--out", str(WORK / f"{kind}-demo"))


def test(sdist: Path) -> None:
    """Run the tests of an sdist, except the thorough ones, in its unpacked folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(WORK, filter="data")
    folder = WORK / sdist.name.removesuffix(".tar.gz")
    environment = Environment("sdist-tests")
    environment.install("-e", f"{folder}[test]")
    environment.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--ignore=tests/thorough", cwd=folder)


def main() -> None:
    """Check a release from its building to its use."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="leave out the sdist's own tests")
    quick = options.parse_args().quick
    WORK.mkdir(parents=True, exist_ok=True)
    archives = build()
    for archive in archives:
        use(archive)
    if not quick:
        test(archives[1])
    print(f"all is well: {', '.join(path.name for path in archives)}")


if __name__ == "__main__":
    main()
