"""A TCP proxy whose network can go away: connections stay open, and nothing passes any more."""

import selectors
import socket
import threading

_LOOK_S = 0.05
_CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Forwards 127.0.0.1:`port` to `target`, a port of this host, until `freeze`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sockets: list[socket.socket] = []
        self._frozen, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-proxy")
        self._thread.start()

    def freeze(self) -> None:
        self._frozen.set()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        self._selector.close()
        for connection in (*self._sockets, self._listener):
            connection.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._frozen.is_set():
                self._over.wait(_LOOK_S)
                continue
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._listener:
                    self._connect()
                else:
                    self._forward(key.fileobj, key.data)

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [near, far]
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            data = source.recv(_CHUNK_BYTES)
            if data:
                sink.sendall(data)
                return
        except OSError:
            pass
        for connection in (source, sink):
            if connection.fileno() >= 0:
                self._selector.unregister(connection)
                connection.close()
