"""How many connections the server of `plan ui` holds: each takes a thread, and anybody on the machine may open them.

    new connection ─▶ fewer than MOST           ─▶ served
                      a stranger, or one waits  ─▶ that is closed in its place: first of those that have not shown the
                                                   token, the one that is there longest
                      all answer their owner    ─▶ the new one is closed

A browser opens six. A connection that has not shown the token is a stranger, and answers of strangers are not
protected: one that sends requests without end, or reads no answer, makes room like one that waits. Nor does it get a
second answer (`planner.ui.server`).
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST = 32


@dataclass
class Connections:
    """The open connections, those that have waited longest first; safe to use from several threads. Only those that
    answer a request with the token are busy."""

    most: int = MOST
    _waiting: dict[socket.socket, bool] = field(default_factory=dict)  # whether it has shown the token
    _busy: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._busy)

    def admit(self, connection: socket.socket) -> bool:
        """Whether a new connection is served; closes one that waits where there are too many."""
        with self._lock:
            if len(self._waiting) + len(self._busy) >= self.most:
                strangers = (one for one, known in self._waiting.items() if not known)
                oldest = next(strangers, None) or next(iter(self._waiting), None)
                if oldest is None:
                    return False
                del self._waiting[oldest]
                with contextlib.suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._waiting[connection] = False
            return True

    def forget(self, connection: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._busy.discard(connection)

    @contextlib.contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """It has shown the token: meanwhile it is not closed for another one; after that it is the last of those that
        wait."""
        with self._lock:
            if self._waiting.pop(connection, None) is not None:  # else it was closed for another one
                self._busy.add(connection)
        try:
            yield
        finally:
            with self._lock:
                if connection in self._busy:
                    self._busy.remove(connection)
                    self._waiting[connection] = True
