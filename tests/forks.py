"""Processes that start without imports: forked from one that has loaded torch, the package and the digits.

Each is a process like any other: it has a folder, an environment and streams of its own, ends as an interpreter ends,
and can be killed. Only what an interpreter or a library reads when it starts, such as the locale or OMP_NUM_THREADS, is
that of the first process; a test of such things starts `sys.executable` itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

LONGEST = 300.0
"""Seconds after which a process is taken for stuck."""


# -- in the tests ------------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """How a process ended: its code, or minus the signal that killed it, and what it said."""

    code: int
    output: str
    errors: str


class Forked:
    """A process made by `Forks.start`; its errors go to a file, so that they never fill a pipe."""

    def __init__(self, told: socket.socket, stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> None:
        told.settimeout(LONGEST)
        self._told, self._lines = told, told.makefile()
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.pid = int(self._lines.readline())
        self._code: int | None = None

    def fork(self, line: str) -> int:
        """Let a script that calls `fork_for_each_line` do so with this line; returns the id of the new process."""
        self.stdin.write(f"{line}\n")
        self.stdin.flush()
        return self._number()

    def forked_code(self) -> int:
        """Wait for the end of the last process by `fork`; returns its code, or minus the signal that killed it."""
        return self._number()

    def _number(self) -> int:
        line = self.stdout.readline()
        assert line, self.done().errors
        return int(line)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> int:
        """Wait for the end; returns the code, or minus the signal that killed it."""
        if self._code is None:
            self._code = int(self._lines.readline())
        return self._code

    def done(self) -> Done:
        """Close its input, and wait for the end of its output and its own."""
        self.stdin.close()
        output, code = self.stdout.read(), self.wait()
        self.stderr.seek(0)
        return Done(code, output, self.stderr.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._code is None:
            if kind is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self.done()
        for file in (self.stdin, self.stdout, self.stderr, self._lines, self._told):
            file.close()


class Forks:
    """The process that forks others; it ends when this one does."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(sys.path)]
        environment, null = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
        with theirs:  # in its own session, so that Ctrl-C reaches only the tests
            self._server = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=null, stdout=null, start_new_session=True
            )

    def start(
        self, script: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Forked:
        """Run a script in a separate process, where it finds its arguments in `sys.argv`."""
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        told, telling = socket.socketpair()
        request = {"script": script, "argv": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())}
        data = json.dumps({**request, "env": dict(os.environ if env is None else env)}).encode()
        with telling:
            streams = [their_stdin, their_stdout, stderr.fileno(), telling.fileno()]
            socket.send_fds(self._channel, [len(data).to_bytes(8, "big")], streams)
            self._channel.sendall(data)
        os.close(their_stdin)
        os.close(their_stdout)
        return Forked(told, os.fdopen(stdin, "w"), os.fdopen(stdout), stderr)

    def run(self, script: str, *arguments: object, **options: Any) -> Done:
        """Run a script to its end."""
        with self.start(script, *arguments, **options) as process:
            return process.done()

    def close(self) -> None:
        """End the process that forks."""
        self._channel.close()
        assert self._server.wait(LONGEST) == 0


# -- in a script -------------------------------------------------------------------------------------------------------


def fork_for_each_line(work: Callable[[str], object]) -> None:
    """Call `work` with each line of the input in a forked process, which has all that is loaded or compiled here.

    Prints its id when it starts, and how it ended.
    """
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                work(line.rstrip("\n"))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# -- in the process that forks, and in those that it makes -------------------------------------------------------------


def load() -> None:
    """Import what most scripts need. Torch is safe in a forked process only with one thread."""
    import torch

    import fedcams.bits.compiling  # or every process would load Numba for its first kernel
    import fedcams.cli
    import fedcams.runs  # noqa: F401
    from fedcams.tasks import task

    torch.set_num_threads(1)
    task("digits").load()
    gc.freeze()  # or every process would search all of torch for garbage when it ends, and copy it


def serve(channel: socket.socket) -> str:
    """Fork for every request, and return its script in the new process; ends when the tests do.

    Between the two is a process that waits for the new one and tells how it ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        size, streams, _, _ = socket.recv_fds(channel, 8, 4)
        if not size:
            os._exit(0)
        request = json.loads(channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        if not os.fork():
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if child := os.fork():
                watch(child, streams)
            return become(request, streams)
        for stream in streams:
            os.close(stream)


def watch(child: int, streams: list[int]) -> None:
    """Tell the id of a process, and how it ends, and end."""
    *others, telling = streams
    for stream in others:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        os.write(telling, f"{child}\n".encode())
        os.write(telling, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> str:
    """Take the streams, folder, environment and arguments of a request; returns its script."""
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell switches off in the background
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = ["-c", *request["argv"]]
    return str(request["script"])


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = ["", *json.loads(sys.argv[2])]  # as `python -c` would, and the tests
    load()
    exec(compile(serve(channel), "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
