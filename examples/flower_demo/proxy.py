"""A TCP proxy in front of a SuperLink that counts the bytes that really travel, including TLS."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

HOST = "127.0.0.1"
CHUNK = 1 << 16


class CountingProxy:
    """Forwards every connection to `target`, and counts the bytes from the node (up) and to it (down)."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def counted(self) -> tuple[int, int]:
        """Return the bytes (up, down) so far."""
        return self.up, self.down

    def close(self) -> None:
        """Close all connections."""
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                node, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(node,), daemon=True).start()

    def _serve(self, node: socket.socket) -> None:
        with contextlib.suppress(OSError), node, socket.create_connection((HOST, self.target)) as link:
            self._open |= {node, link}
            try:
                self._pump(node, link)
            finally:
                self._open -= {node, link}

    def _pump(self, node: socket.socket, link: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(node, selectors.EVENT_READ, (link, self._count_up))
            ready.register(link, selectors.EVENT_READ, (node, self._count_down))
            while True:
                for key, _ in ready.select():
                    source, (sink, count) = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    sink.sendall(data)
                    count(len(data))

    def _count_up(self, size: int) -> None:
        self.up += size

    def _count_down(self, size: int) -> None:
        self.down += size
