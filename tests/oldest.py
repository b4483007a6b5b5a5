"""Print constraints that hold every dependency of pyproject.toml at the oldest version it allows, torch left out.

    python tests/oldest.py > oldest.txt
    pip install -c oldest.txt -e '.[dev]'

Torch is left out because it is installed first, in the build that suits the machine.
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


def oldest(project: dict[str, object]) -> Iterator[str]:
    """Yield `name==version` for every dependency of a project, and of its extras, that has a lower bound."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    for asked in (project["dependencies"], *extras.values()):
        assert isinstance(asked, list)
        found = filter(None, map(OLDEST.match, asked))
        yield from (f"{one['name']}=={one['version']}" for one in found if one["name"] not in APART)


if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    sys.stdout.write("".join(f"{line}\n" for line in dict.fromkeys(oldest(project))))
