"""What a fresh process loads, compiles and prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fedcams.runs import read_run
from forks import Forks
from test_cli import FEDCAMS
from test_cli import folder as folder
from test_repository import MODULES

UNUSED = ["flwr", "matplotlib", "numba", "pandas", "sklearn", "typer"]
"""Never loaded by `import fedcams`, nor by a module that does without them until it is used."""

IMPORT_PROBE = """
import importlib, json, sys
import fedcams
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
loaded = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
from fedcams.bits.parallel import Kernel
ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "fedcams"]
kernels = {f"{v.__module__}.{v.__name__}": v for m in ours for v in vars(m).values() if isinstance(v, Kernel)}
compiled = sorted(name for name, kernel in kernels.items() if "compiled" in vars(kernel))
print(json.dumps({"loaded": loaded, "kernels": len(kernels), "compiled": compiled}))
"""


def test_as_a_process(folder: Path, forks: Forks) -> None:
    """A module that starts from nothing, and an error without a traceback."""
    command = [sys.executable, "-m", "fedcams", "run", "mini.toml", "-s", "rounds=3", "--no-report"]
    command += ["--only", "FedCAMS sign"]
    good = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, cwd=folder)
    assert good.returncode == 0, good.stderr
    assert "round 3/3" in good.stdout
    assert read_run(folder / "runs/mini/fedcams-sign-s1").finished
    bad = forks.run(FEDCAMS, "run", "mini.tmol", cwd=folder)
    assert bad.code == 2
    assert bad.errors.startswith("error: no preset is named 'mini.tmol'")
    assert "Traceback" not in bad.errors


def test_importing_loads_nothing_unused_and_compiles_nothing() -> None:
    needy = {
        "flower",
        "cli",
        "__main__",
        "_fused",
        "compiling",
        "kernels",
        "launch",
        "launch_norms",
        "fused",
    }  # imported when used, by those who have what they need
    plain = sorted(name for name in MODULES if not needy & set(name.split(".")))
    probe = [sys.executable, "-c", IMPORT_PROBE, json.dumps(UNUSED), json.dumps(plain)]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert not seen["loaded"], f"importing loads {seen['loaded']}; import them where they are used"
    assert seen["kernels"] > 0, "no kernel was found, so this test looks in the wrong place"
    assert not seen["compiled"], f"compiled while importing: {seen['compiled']}; leave it to the first call"
