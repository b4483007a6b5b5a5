"""A federation on one machine: SuperLink, SuperNodes and runs as processes on loopback, ended by their ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certificates import make_certificates, make_node_key

BIN = Path(sys.executable).parent
APP = Path(__file__).resolve().parents[1] / "flower_app"
HOST = "127.0.0.1"
ASK_EVERY = 30.0
"""Seconds between two checks whether a run is alive."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Settings that keep Flower from contacting anything outside the machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children and of their descendants."""
    told = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in told.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in pairs if its_parent == parent]
    return found[1:]


@dataclass
class Federation:
    """One SuperLink, with TLS and node authentication if `secure`; `lasting` runs survive a kill of the SuperLink."""

    folder: Path
    secure: bool = False
    lasting: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        if self.secure and not (self.keys / "ca.crt").exists():
            make_certificates(self.keys)
        trust = f'root-certificates = "{self.keys / "ca.crt"}"' if self.secure else "insecure = true"
        text = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{HOST}:{self.port}"\n{trust}\n'
        (self.home / "config.toml").write_text(text)

    @property
    def home(self) -> Path:
        return self.folder / "flwr"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {"FLWR_HOME": str(self.home), "PATH": path, "FEDCAMS_STATE": str(self.folder / "sites")}
        return {**os.environ, **QUIET, **own, **self.env}

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process in its own group, with its output in `<name>.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM, patience: float = 10.0) -> None:
        """End a process and its children by the id of their group."""
        process = self.processes.pop(name)
        for sent in (how, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def stop_all(self) -> None:
        """End everything, including apps that Flower has put into their own groups."""
        family = [pid for process in self.processes.values() for pid in descendants(process.pid)]
        for name in reversed(list(self.processes)):
            self.stop(name)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- Flower's parts ------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the SuperLink, and a second process, which runs ServerApps and survives the SuperLink."""
        trust = ["--insecure"]
        if self.secure:
            parts = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
            trust = [f"--ssl-{option}={self.keys / name}" for option, name in parts.items()]
            trust.append("--enable-supernode-auth")
        address = ["--host", HOST, "--port", str(self.port), "--database", str(self.folder / "link.db")]
        isolation = ["--isolation", "process"] if self.lasting else []
        self.start("superlink", "flower-superlink", *trust, *address, *isolation)
        self.wait_for_port()
        if self.lasting and "superexec" not in self.processes:
            root = [f"--root-certificates={self.keys / 'ca.crt'}"] if self.secure else ["--insecure"]
            self.start("superexec", "flower-superexec", *root, "--runtime-api-address", f"{HOST}:{self.port}")

    def wait_for_port(self, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (code := self.processes["superlink"].poll()) is not None:
                raise RuntimeError(f"the SuperLink ended with {code}: {self.log('superlink')[-2000:]}")
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1.0):
                return
            time.sleep(0.1)
        raise TimeoutError("the SuperLink does not answer")

    def start_node(self, site: int, via: int | None = None, register: bool = True, name: str = "") -> str:
        """Start a SuperNode for this site; `via` is the port of a proxy in front of the SuperLink."""
        name = name or f"node{site}"
        trust = ["--insecure"]
        if self.secure:
            key = self.keys / name
            if not key.exists():
                make_node_key(key)
                if register:
                    self.flwr("supernode", "register", str(key.with_suffix(".pub")), "here")
            trust = [f"--root-certificates={self.keys / 'ca.crt'}", f"--auth-supernode-private-key={key}"]
        own = ["--host", HOST, "--port", str(free_port()), "--node-config", f"site-id={site}"]
        self.start(name, "flower-supernode", *trust, "--superlink", f"{HOST}:{via or self.port}", *own)
        return name

    def flwr(self, *command: str, timeout: float = 120.0) -> str:
        """Run a `flwr` command, and return its output."""
        full = [str(BIN / "flwr"), *command]
        done = subprocess.run(
            full, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    # -- runs ----------------------------------------------------------------------------------------------------

    def submit(self, app: Path = APP, **config: Any) -> str:
        """Start a run, and return its id."""
        values = {"checkpoint": str(self.folder / "server"), **config}
        file = self.folder / "run-config.toml"
        file.write_text("".join(f"{key.replace('_', '-')} = {json.dumps(value)}\n" for key, value in values.items()))
        told = self.flwr("run", str(app), "here", "--run-config", str(file), "--format", "json")
        return str(json.loads(told[told.index("{") :])["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run, such as `running` or `finished:completed`."""
        told = self.flwr("list", "--run-id", run, "--format", "json")
        return str(json.loads(told[told.index("{") :])["runs"][0]["status"])

    def rounds_done(self, checkpoint: Path | None = None) -> int:
        """Return the last finished round from the server's files; asking Flower would start an interpreter."""
        state = (checkpoint or self.folder / "server") / "state.json"
        return int(json.loads(state.read_bytes())["round"]) if state.exists() else 0

    def wait(self, run: str, rounds: int, checkpoint: Path | None = None, seconds: float = 600.0) -> None:
        """Wait until this many rounds are done; check now and then whether the run is still alive."""
        start, asked = time.monotonic(), time.monotonic()
        while self.rounds_done(checkpoint) < rounds:
            now = time.monotonic()
            if now - asked > ASK_EVERY:
                asked = now
                if (status := self.status(run)).startswith("finished") and self.rounds_done(checkpoint) < rounds:
                    told = self.flwr("log", run, "here", "--show")
                    raise RuntimeError(f"run {run} is {status} after {self.rounds_done(checkpoint)} rounds:\n{told}")
            if now - start > seconds:
                raise TimeoutError(f"{self.rounds_done(checkpoint)} of {rounds} rounds after {seconds} s")
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def federation(folder: Path, **options: Any) -> Iterator[Federation]:
    """Yield a federation whose processes end with it, whatever happens, even on SIGTERM."""
    made = Federation(folder, **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        made.start_link()
        yield made
    finally:
        made.stop_all()
