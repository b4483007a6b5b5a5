"""Commands on a PATH that start without imports: each is forked from a process that has loaded what it needs.

For programs that start others by name, as Flower starts an app for every message. Whoever starts such a command waits
for it, gets its code and may kill it, which ends the forked process too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forks import Forks, become

# -S and -E: nothing of the environment is needed to ask for a process, and looking for it takes longer than asking.
COMMAND = """#!{python} -SE
import sys
sys.path.insert(0, {tests!r})
from forked_commands import ask
sys.exit(ask({socket!r}, {script!r}))
"""
SERVER = """
import importlib, sys
from forked_commands import serve
for name in sys.argv[3:]:
    importlib.import_module(name)
exec(compile(serve(sys.argv[1], sys.argv[2]), "<script>", "exec"), {"__name__": "__main__"})
"""
RUN = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@contextlib.contextmanager
def forked_commands(
    forks: Forks, scripts: Mapping[str, Path], modules: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Yield a folder for the PATH with these commands, each of which runs a Python script.

    The modules are loaded before, with the environment that is given or that of this process.
    """
    with tempfile.TemporaryDirectory() as made:
        folder, tests = Path(made), str(Path(__file__).parent)
        address = str(folder / "asked")
        for name, script in scripts.items():
            text = COMMAND.format(python=sys.executable, tests=tests, socket=address, script=str(script))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        with forks.start(SERVER, address, RUN, *modules, env=env) as server:
            assert server.stdout.readline() == "ready\n", server.done().errors
            yield folder


# -- in a command ------------------------------------------------------------------------------------------------------


def ask(address: str, script: str) -> int:
    """Have a script run with the streams, folder, environment and arguments of this process; returns its code."""
    request = {"argv": [script, *sys.argv[1:]], "cwd": str(Path.cwd()), "env": dict(os.environ)}
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(data)
        told = connection.makefile().read()
    return int(told) if told else 1


# -- in the process that forks, and in those that it makes -------------------------------------------------------------


def serve(address: str, script: str) -> str:
    """Fork for everyone who asks, and return the script in the new process; ends with the input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin.fileno() not in select.select([sys.stdin.fileno(), listener], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
            if not os.fork():
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if child := os.fork():
                    attend(child, connection, streams)
                return become({**request, "script": script}, [*streams, connection.detach()])
        for stream in streams:
            os.close(stream)
    os._exit(0)


def attend(child: int, connection: socket.socket, streams: list[int]) -> None:
    """Report how a process ends, and end; kill it if the other side is gone."""
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = status = 0
    while not ended:
        if select.select([connection], [], [], 0.02)[0]:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)
