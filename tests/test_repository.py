"""The repository as a whole: one-way dependencies, a light import, clean files, one version."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fedcams
from together import together

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedcams"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LEVELS: list[set[str]] = [
    {"version", "errors", "extras", "registry", "durable", "escaping"},
    {"layout", "bits", "keys", "schedules", "buffers", "recipes"},
    {"compress", "optimizers", "local", "models", "tasks", "partition", "sampler"}
    | {"parts", "transforms", "probes", "control", "aggregates", "averages", "guards"},
    {"wire", "feedback", "rows", "downlink", "aggregate", "engines", "privacy"},
    {"method"},
    {"rounds"},
    {"simulation"},
    {"experiment"},
    {"theory"},
    {"runs"},
    {"report", "trackers", "bench", "plan", "flower"},
    {"own", "cli"},
    {"__main__"},
]
"""A module imports from its own level or from lower ones; `fedcams` itself (its __init__) stands above them all."""

MAX_LINES = 300


def name_of(source: Path) -> str:
    """`src/fedcams/bits/rice.py` -> `fedcams.bits.rice`; a package is its folder."""
    parts = source.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(source) for source in SOURCES}


def imports_of(tree: ast.Module, name: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module) for every import, also those inside functions and under TYPE_CHECKING."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                member = f"{origin}.{alias.name}"
                yield node.lineno, member if member in MODULES else origin


def level_of(module: str) -> int:
    """The place of a module in LEVELS; `fedcams` alone is above the last."""
    if module == "fedcams":
        return len(LEVELS)
    top = module.split(".")[1]
    for level, names in enumerate(LEVELS):
        if top in names:
            return level
    pytest.fail(f"fedcams.{top} has no level: add {top!r} to LEVELS in tests/test_repository.py and CONTRIBUTING.md")


def upward_imports(source: str, name: str, is_package: bool = False) -> list[str]:
    """One line for each import that points up, or that only the Flower adapter may make."""
    found = []
    for line, target in imports_of(ast.parse(source), name, is_package):
        if target.split(".")[0] == "flwr" and name.split(".")[1:2] != ["flower"]:
            found.append(f"line {line}: {name} imports {target}; only fedcams.flower may")
        if target.split(".")[0] == "fedcams" and level_of(target) > level_of(name):
            found.append(f"line {line}: {name} imports {target}, which is on a higher level")
    return found


@together("source", SOURCES, ids=name_of)
def test_dependencies_point_one_way(source: Path) -> None:
    found = upward_imports(source.read_text("utf-8"), name_of(source), source.name == "__init__.py")
    assert not found, "\n".join(found)


@together(
    ("name", "source", "upward"),
    [
        ("fedcams.layout", "from fedcams.errors import LayoutError\nimport fedcams.bits.rice", 0),
        ("fedcams.errors", "from fedcams.layout import Layout", 1),
        ("fedcams.errors", "def f():\n    import fedcams.rounds", 1),
        ("fedcams.bits.rice", "from ..compress import topk", 1),
        ("fedcams.bits.rice", "from ..errors import Truncated\nfrom .signs import pack", 0),
        ("fedcams.bits", "from .signs import pack", 0),
        ("fedcams.rounds", "from fedcams import errors", 0),
        ("fedcams.rounds", "from fedcams import __version__", 1),
        ("fedcams.rounds", "import flwr.client", 1),
        ("fedcams.rounds", "import flwrish\nimport torch", 0),
    ],
)
def test_the_reader_of_imports_sees_them(name: str, source: str, upward: int) -> None:
    assert len(upward_imports(source, name, is_package=name == "fedcams.bits")) == upward


def test_a_new_module_is_told_where_to_go() -> None:
    with pytest.raises(pytest.fail.Exception, match="add 'novelty' to LEVELS"):
        level_of("fedcams.novelty.thing")


@together("source", SOURCES, ids=name_of)
def test_files_stay_short(source: Path) -> None:
    lines = len(source.read_text("utf-8").splitlines())
    assert lines <= MAX_LINES, f"{source.relative_to(ROOT)} has {lines} lines; split it by what it does"


def hidden_modules(package: str, modules: set[str]) -> set[str]:
    """The modules of a package that `package.name` does not lead to, since `name` is something else there."""
    room = importlib.import_module(package)
    inside = {module.rpartition(".")[2] for module in modules if module.rpartition(".")[0] == package}
    bound = inside & {*vars(room), *getattr(room, "__all__", ())}  # some names are loaded when they are first used
    return {f"{package}.{name}" for name in bound if not isinstance(getattr(room, name), ModuleType)}


PACKAGES = [source for source in SOURCES if source.name == "__init__.py"]
HAS_FLOWER = importlib.util.find_spec("flwr") is not None


@together("source", [s for s in PACKAGES if HAS_FLOWER or "flower" not in s.parts], ids=name_of)
def test_no_module_is_hidden_by_an_object_of_its_name(source: Path) -> None:
    found = hidden_modules(name_of(source), MODULES)
    assert not found, f"{sorted(found)}: name the module for what is in it, not for its one object"


def test_a_hidden_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("from room.thing import thing\nfrom room import other\n")
    (tmp_path / "room" / "thing.py").write_text("def thing(): ...\n")
    (tmp_path / "room" / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hidden_modules("room", {"room", "room.thing", "room.other"}) == {"room.thing"}


IN_PLACE = re.compile(r"[^_]_$")
SAYS_SO = re.compile(r"[Oo]verwrites (?:`|the tensors of the old)")


def unmarked(tree: ast.Module) -> Iterator[str]:
    """Functions that overwrite a parameter, or say that they do, although their name does not end in `_`.

    `out`, where a caller asks for a result, is none of them.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name.endswith("_"):
            continue
        arguments = [*function.args.args, *function.args.kwonlyargs]
        tensors = {a.arg for a in arguments if a.annotation and "Tensor" in ast.unparse(a.annotation)} - {"out"}
        changed = {name for node in ast.walk(function) for name in overwritten(node)} & tensors
        if changed or SAYS_SO.search(ast.get_docstring(function) or ""):
            yield f"line {function.lineno}: {function.name} overwrites {', '.join(sorted(changed)) or 'an argument'}"


def overwritten(node: ast.AST) -> Iterator[str]:
    """The names of what a node overwrites: `x.add_(...)`, `x[0] = ...`, `x += ...`."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and IN_PLACE.search(node.func.attr):
        targets = [] if node.func.attr == "requires_grad_" else [node.func.value]
    elif isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    for target in targets:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


@together("source", SOURCES, ids=name_of)
def test_what_overwrites_an_argument_ends_in_an_underscore(source: Path) -> None:
    found = list(unmarked(ast.parse(source.read_text("utf-8"))))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("body", "overwrites"),
    [("x.add_(1)", True), ("x[0][1] = 2", True), ("x += 1", True), ("x = x + 1", False), ("y = x.add(1)", False)],
)
def test_functions_that_overwrite_an_argument_are_found(body: str, overwrites: bool) -> None:
    for name, argument in (("f", "x"), ("f_", "x"), ("f", "out")):
        text = f"def {name}({argument}: Tensor, n: int):\n    {body.replace('x', argument)}\n"
        assert bool(list(unmarked(ast.parse(text)))) == (overwrites and name == "f" and argument == "x")
    assert list(unmarked(ast.parse('def f(x):\n    """Overwrites `x`."""\n')))


def untidy_docstrings(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods whose docstring does not begin with a sentence on a line of its own."""
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                first = (ast.get_docstring(node) or "A magic or documented base.").partition("\n")[0]
                if not (first[:1].isupper() and first.endswith(".")):
                    yield f"line {node.lineno}: {node.name}: {first!r}"
                scopes += [node] if isinstance(node, ast.ClassDef) else []


@together("source", SOURCES, ids=name_of)
def test_docstrings_begin_with_a_sentence(source: Path) -> None:
    found = list(untidy_docstrings(ast.parse(source.read_text("utf-8"))))
    assert not found, "\n".join(found)


def test_untidy_docstrings_are_found() -> None:
    text = 'class A:\n    """Does it."""\n    def f(self):\n        """`x` -> y."""\ndef g():\n    """Without end"""\n'
    assert [line.split(":")[1].strip() for line in untidy_docstrings(ast.parse(text))] == ["g", "f"]


# Brackets keep these patterns from matching their own source; each begins with a letter, which is found fast.
FORBIDDEN = {
    "a path on someone's machine": re.compile(
        r"/(?<![\w.~$}>)*-]/)(?:home|root|tmp|work|opt|mnt|Users|private/var)/[\w.]"
    ),
    "a path on someone's Windows": re.compile(r":\\(?<=\b[A-Z]:\\)(?:Users|Temp)\b"),
    "a file address": re.compile(r"file(?<=\bfile):/{2}"),
    "a package index": re.compile(r"-index[-]url\b|find[-]links\b"),
    "a conflict marker": re.compile(r"^(?:<{7}|>{7})(?: |$)", re.MULTILINE),
}
SKIPPED = {".git", ".venv", "__pycache__", "build", "dist", ".hypothesis"}


def files_of_the_repository() -> list[Path]:
    """What git tracks or would track; without git (an unpacked archive), everything that is not a cache."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        paths = (p for p in ROOT.rglob("*") if not any(_is_skipped(part) for part in p.relative_to(ROOT).parts))
    else:
        paths = (ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name)
    return sorted(p for p in paths if p.is_file())


def _is_skipped(part: str) -> bool:
    return part in SKIPPED or part.endswith(("_cache", ".egg-info"))


def forbidden_in(text: str) -> list[str]:
    hits = ((what, pattern.search(text)) for what, pattern in FORBIDDEN.items())
    return [f"line {text.count(chr(10), 0, hit.start()) + 1}: {what}: {hit[0]!r}" for what, hit in hits if hit]


def test_files_hold_nothing_of_one_machine() -> None:
    found = []
    for path in files_of_the_repository():
        data = path.read_bytes()
        if b"\0" not in data:
            text = data.decode("utf-8")
            found += [f"{path.relative_to(ROOT)}, {hit}" for hit in forbidden_in(text)]
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_are_for() -> None:
    slash, dash = "/", "-"
    machine = [f'open("{slash}home/ada/x")', f"see {slash}tmp/run", "C:" + chr(92) + "Users", f"{slash}root/.cache"]
    others = [f"file:{slash}{slash}x", f"--extra{dash}index{dash}url=x", "a\n" + "<" * 7 + " ours"]
    assert all(forbidden_in(text) for text in machine + others)
    harmless = ["src/home/page", f"a{slash}tmp/b", f"~{slash}tmp/x", "framework/root", "=" * 7 + "\n"]
    assert not any(forbidden_in(text) for text in harmless)


@together("source", SOURCES, ids=lambda source: str(source.relative_to(PACKAGE)))
def test_modules_that_windows_lacks_are_imported_where_they_are_used(source: Path) -> None:
    assert not re.search(r"^(?:import|from) (?:fcntl|resource|pwd|termios)\b", source.read_text(), re.MULTILINE)


def test_the_version_is_the_same_wherever_it_stands() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert importlib.metadata.version("fedcams") == stated, "the installed package is older: touch pyproject.toml; make"
    assert fedcams.__version__ == stated
    assert f"\nversion: {stated}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_flower_installs_nothing_for_the_apps() -> None:
    """For each run, it would fetch what an app lists, torch included, into a new environment, or fail offline."""
    projects = [*ROOT.glob("examples/*/pyproject.toml"), ROOT / "src/fedcams/template/pyproject.toml.txt"]
    assert len(projects) > 2
    for path in projects:
        assert "dependencies" not in tomllib.loads(path.read_text("utf-8"))["project"], path


def test_names_are_loaded_when_they_are_asked_for() -> None:
    package = importlib.import_module("fedcams")
    assert all(callable(getattr(package, name)) for name in package.__all__ if name != "__version__")
    assert set(package.__all__) <= set(dir(package))
    assert package.rounds is importlib.import_module("fedcams.rounds")
    with pytest.raises(AttributeError, match="module 'fedcams' has no attribute 'simulat'"):
        package.simulat  # noqa: B018
