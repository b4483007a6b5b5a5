"""`fedcams new`: write a small project with its own model, data, experiment and Flower app."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcams.durable import os_errors
from fedcams.errors import FedcamsError, SpecError

TEMPLATE = Path(__file__).parents[1] / "template"
PACKAGE, PROJECT = "my_project", "my-project"
"""Placeholders in the template for the names of the new project."""
SUFFIX = ".txt"
"""The suffix of template files that tools would otherwise treat as part of fedcams, such as modules."""
NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
LONGEST = 32  # the longest name that Flower accepts
START = """\
{name} is ready. Run:

  cd {name}
  python -m {package}.simulate
  fedcams report runs

README.md says how to run the Flower app, and what to change.\
"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the project and of its folder: my-project.")],
) -> None:
    """Write a small project that runs as it is: a model, data, an experiment and a Flower app, for you to change.

    Creates the folder NAME in the current folder. Never writes into a folder that already holds files.
    """
    write_project(name, Path.cwd())
    console = Console(highlight=False, soft_wrap=True)
    console.print(START.format(name=name, package=package_of(name)), markup=False)


def write_project(name: str, parent: Path) -> Path:
    """Write a project to the folder `name` in `parent` and return its path; all of it, or nothing if that fails.

    Raises:
        SpecError: for a name that cannot be that of a Python package.
        FedcamsError: for a folder that is not empty or cannot be written.
    """
    package, folder = package_of(name), parent / name
    with os_errors(FedcamsError, "write", folder, "go to a folder where you may write, or free space"):
        refuse_used(folder)
        with tempfile.TemporaryDirectory(dir=parent) as temporary:
            made = Path(temporary) / name
            made.mkdir()
            for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
                target = made / source.relative_to(TEMPLATE).as_posix().replace(PACKAGE, package).removesuffix(SUFFIX)
                target.parent.mkdir(exist_ok=True)
                text = source.read_text("utf-8").replace(PACKAGE, package).replace(PROJECT, package.replace("_", "-"))
                target.write_text(text, "utf-8")
            if folder.exists():
                folder.rmdir()  # it is empty
            shutil.move(made, folder)
    return folder


def package_of(name: str) -> str:
    """Return the Python package of a project: `my-project` -> `my_project`; refuse a name that cannot have one."""
    package = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        raise SpecError(
            f"NAME={name!r}: use lower-case letters, digits and single hyphens, a letter first, at most {LONGEST} "
            "characters in all, such as my-project; to write elsewhere, go to that folder first"
        )
    if keyword.iskeyword(package) or is_module(package):
        raise SpecError(
            f"NAME={name!r}: {package} is a Python keyword, or an installed module that the project would hide; "
            f"choose another name, such as my-{name}"
        )
    return package


def is_module(package: str) -> bool:
    """Return whether `import package` finds a module; a plain folder of that name does not count."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def refuse_used(folder: Path) -> None:
    """Refuse a path that exists, unless it is an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise FedcamsError(f"{folder.name} exists and is not an empty folder; give another name, or remove it")
