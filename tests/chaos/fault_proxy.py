"""An HTTP proxy between a SuperNode and the SuperLink that loses, delays or repeats chosen replies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

HOST = "127.0.0.1"
PUSH = b"/v1/fleet/push-messages"
GONE = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


class FaultProxy:
    """Passes requests on one by one. `decide()` is asked for every reply pushed: "", "drop", "delay" or "twice"."""

    def __init__(
        self, target: int, decide: Callable[[], str], wait: Callable[[], None], sent: Callable[[], None]
    ) -> None:
        """`wait` returns when a delayed reply may go on; `sent` is told when a reply was taken by the SuperLink."""
        self.target, self.decide, self.wait, self.sent = target, decide, wait, sent
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(node,), daemon=True).start()

    def _serve(self, node: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), node, node.makefile("rb") as requests:
            while True:
                request = read_message(requests)
                node.sendall(self._forward(request))

    def _forward(self, request: bytes) -> bytes:
        """The answer to a request; a broken SuperLink breaks the connection, as it would without us."""
        fault = self.decide() if PUSH in request.split(b"\r\n", 1)[0] else None
        if fault == "drop":
            return GONE
        if fault == "delay":
            self.wait()
        answer = self._ask(request)
        if fault is not None:
            threading.Thread(target=self._follow, args=(request, fault), daemon=True).start()
        return answer

    def _follow(self, request: bytes, fault: str) -> None:
        """A second copy comes when the server has the first: earlier, Flower would take it for a new attempt."""
        self.sent()
        if fault == "twice":
            with contextlib.suppress(OSError, EOFError):
                self._ask(request)

    def _ask(self, request: bytes) -> bytes:
        with socket.create_connection((HOST, self.target)) as link, link.makefile("rb") as answers:
            link.sendall(request)
            return read_message(answers)


def read_message(stream: object) -> bytes:
    """One HTTP message with a length."""
    head, length = b"", 0
    while True:
        line = stream.readline()  # type: ignore[attr-defined]
        if not line:
            raise EOFError
        head += line
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
        if line == b"\r\n":
            body = stream.read(length)  # type: ignore[attr-defined]
            if len(body) < length:
                raise EOFError
            return head + bytes(body)
