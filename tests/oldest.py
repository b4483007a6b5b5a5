"""Print constraints that hold what users install at the oldest version that pyproject.toml allows, torch left out.

    python tests/oldest.py > oldest.txt
    pip install -c oldest.txt -e '.[dev]'

Torch is left out because it is installed first, in the build that suits the machine; tools of development are left out
because users do not install them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
OLDEST = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=(?P<version>[0-9.]+)")
APART = ("torch", "triton")
"""What comes with the build of torch."""
TOOLS = ("dev", "test")
"""Extras that only those who work on the package install."""


def oldest(project: dict[str, object]) -> Iterator[str]:
    """Yield `name==version` for every dependency of a project, and of its extras, that has a lower bound."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    for asked in (project["dependencies"], *(wanted for name, wanted in extras.items() if name not in TOOLS)):
        assert isinstance(asked, list)
        found = filter(None, map(OLDEST.match, asked))
        yield from (f"{one['name']}=={one['version']}" for one in found if one["name"] not in APART)


if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    sys.stdout.write("".join(f"{line}\n" for line in dict.fromkeys(oldest(project))))
