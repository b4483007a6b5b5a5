"""What mkdocs.yml cannot express: its version, the pages of the Python API, links that leave docs/, and formulas."""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedcams"
MIKE_SAYS = "MIKE_DOCS_VERSION"
"""The environment variable that mike sets while it builds one version of the site among others."""
COPIED = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages of the repository's root that the site shows too."""
WIDE = ("leaderboard.md", "demo/summary.md", "comparison.md")
"""Pages whose tables need the room of the table of contents."""
FIRST = ("simulate", "over_test_set", "Method", "server", "compressor", "Layout", "encode", "decode", "payload_size")
"""The order in which readers need the names of `fedcams`; the others follow alphabetically."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>([.,:;)]*)', re.DOTALL)
NORM = "&#x02016;"
"""The bars of a norm: as operators they would grow to different heights."""
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version that the site describes or, if mike builds it, let readers choose one.

    A page with that choice fetches the list of versions, so a single site, or one opened from disk, has none.
    """
    if MIKE_SAYS in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
        return config
    stated = re.search(r'__version__ = "(.+)"', (PACKAGE / "version.py").read_text("utf-8"))
    assert stated
    config.site_name += f" {stated[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {f"api/{name}.md": api_page(name) for name in api_modules()}
    made |= {name.lower(): from_root((ROOT / name).read_text("utf-8")) for name in COPIED}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files outside docs/, which the site does not hold, into their paths; make room for wide tables."""
    folder = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if "://" in link[2] or path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        return f"`{path}`" if link[1].strip("`/") == path else f"{link[1]} (`{path}`)"

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas from LaTeX into MathML, which browsers show without a script or a network."""

    def shown(formula: re.Match[str]) -> str:
        block = formula[1] == "div"
        drawn = convert(unescape(formula[2]).strip(), display="block" if block else "inline")
        drawn = drawn.replace(f"<mo>{NORM}</mo>", f'<mi mathvariant="normal">{NORM}</mi>')
        if block:
            return f'<div class="formula">{drawn}</div>{formula[3]}'
        # A browser may begin a line with what follows a formula, even with a comma.
        return f'<span class="unbroken">{drawn}{formula[3]}</span>' if formula[3] else drawn

    return FORMULA.sub(shown, html)


def from_root(text: str) -> str:
    """Return a page of the repository's root with its links as they are from docs/."""

    def moved(link: re.Match[str]) -> str:
        target = link[2].removeprefix("docs/") if link[2].startswith("docs/") else f"../{link[2]}"
        return link[0] if "://" in link[2] else f"[{link[1]}]({target}{link[3] or ''})"

    return LINK.sub(moved, text)


# -- the Python API ---------------------------------------------------------------------------------------------------


def api_modules() -> list[str]:
    """Return the modules that have a page: `fedcams` and everything public directly in it."""
    inside = (p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())
    return ["fedcams", *sorted(f"fedcams.{name}" for name in inside if not name.startswith("_"))]


def api_page(module: str) -> str:
    """Return a page with the names that a module exports, then those of each module inside it."""
    exported = exports(source_of(module))
    if module == "fedcams":
        rest = [name for name in exported if name not in FIRST]
        return f"# {module}\n\n{directive(module, [*FIRST, *rest])}      group_by_category: false\n"
    above = exports(PACKAGE / "__init__.py")
    own = [name for name in (exported or definitions(source_of(module))) if name not in above]
    parts = [f"# {module}\n", *_elsewhere([name for name in exported if name in above]), directive(module, own)]
    for name in submodules(module):
        names = [each for each in definitions(source_of(name)) if each not in {*exported, *above}]
        parts.append(directive(name, names, heading=True))
    return "\n".join(parts)


def _elsewhere(names: list[str]) -> Iterator[str]:
    if names:
        yield "On the page of `fedcams`: " + ", ".join(f"[`{name}`][fedcams.{name}]" for name in names) + ".\n"


def directive(module: str, names: list[str], heading: bool = False) -> str:
    """Return mkdocstrings' directive for a module and these of its names."""
    level = f"      heading_level: 2\n      show_root_heading: {str(heading).lower()}\n"
    return f"::: {module}\n    options:\n{level}      members: {names or 'false'}\n"


def source_of(module: str) -> Path:
    """Return the file of a module."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def submodules(module: str) -> list[str]:
    """Return all public modules inside a package, at any depth."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in folder.rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(name for name in names - {module} if "._" not in name)


def exports(source: Path) -> list[str]:
    """Return a module's `__all__`, or nothing."""
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def definitions(source: Path) -> list[str]:
    """Return the public classes and functions of a module, and its constants that have a docstring."""
    body = ast.parse(source.read_text("utf-8")).body
    found = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node, following in zip(body, body[1:], strict=False):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if documented and isinstance(target, ast.Name):
            found.append(target.id)
    return [name for name in found if not name.startswith("_")]
