"""Forked commands behave like ordinary ones: streams, arguments, folder, environment, exit codes and kills."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from forked_commands import forked_commands
from forks import Forks

SCRIPT = """
import json, os, sys, time
print(json.dumps([os.getpid(), sys.argv[1:], os.getcwd(), os.environ["MARK"], sys.stdin.readline()]), flush=True)
if "wait" in sys.argv:
    time.sleep(300)
sys.exit(3)
"""


def test_a_command_is_a_process_like_any_other(tmp_path: Path, forks: Forks) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with forked_commands(forks, {"told": script}) as commands:
        path = os.pathsep.join([str(commands), os.environ["PATH"]])
        options = {"cwd": tmp_path, "env": {**os.environ, "PATH": path, "MARK": "here"}, "text": True}
        done = subprocess.run(["told", "a", "b c"], input="line\n", stdout=subprocess.PIPE, check=False, **options)
        assert done.returncode == 3
        assert done.stdout.endswith(f', ["a", "b c"], "{tmp_path}", "here", "line\\n"]\n')
        with subprocess.Popen(["told", "wait"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options) as waiting:
            assert waiting.stdout is not None
            forked = int(waiting.stdout.readline()[1:].partition(",")[0])
            assert forked != waiting.pid
            waiting.kill()
        assert ends(forked), "the forked process outlives the command"


def ends(pid: int, seconds: float = 60) -> bool:
    """Whether a process is gone before the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False
