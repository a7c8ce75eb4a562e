"""The server of `plan ui`: on the loopback address only, for the one who has the address with its token.

    GET  /?token=T                     the page
    GET  /api/choices                  models, profiles, engines
    POST /api/searches                 start a search, as JSON says (`planner.ui.jobs`)
    GET  /api/searches/N?seen=V        how far it is; answers when there is news
    POST /api/searches/N/stop          end it
    GET  /api/searches/N/operator?name=NAME          what other strategies of an operator cost
    GET  /api/searches/N/plan.json, report.html      the plan as a file, the page of `plan report`
    GET  /api/searches/N/settings.zip?engine=NAME    settings of an engine, with what is given up

Whoever is on this machine may connect to it, and so may pages of others in the same browser. So each request has the
token, in a header or in the address; the Host has to be the loopback address, which no rebound name is; and answers say
that nothing else may frame or read them. What comes in is text with limits, and names no file and no code.
"""

import secrets
import threading
from collections.abc import Callable
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from planner.errors import RequestError
from planner.ui.connections import Connections
from planner.ui.handler import HOST, Handler
from planner.ui.jobs import Jobs, Models

_FIRST_PORT = 1024  # the first one that needs no rights


class Server:
    """Serves the page until it is closed; `address` is where, with the token."""

    def __init__(self, *, port: int = 0, model: str | None = None, graph_cache: str | None = None) -> None:
        if 0 < port < _FIRST_PORT:
            raise RequestError(
                f"--port {port}: ports below {_FIRST_PORT} belong to the system; give one from {_FIRST_PORT} to 65535,"
                " or leave it out for a free one"
            )
        self.token = secrets.token_urlsafe(24)
        self.model = model
        self.jobs = Jobs(Models(graph_cache))
        try:
            self._http = _Http((HOST, port), partial(Handler, self))
        except OSError as error:
            raise RequestError(f"--port {port}: cannot be listened on: {error.strerror}; leave it out") from error
        self.port = int(self._http.server_address[1])

    @property
    def connections(self) -> Connections:
        """Those that are open."""
        return self._http.connections

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={quote(self.token)}"

    def run(self) -> None:
        """Serve until `close`."""
        self._http.serve_forever(poll_interval=0.1)

    def start(self) -> threading.Thread:
        """Serve in a thread."""
        thread = threading.Thread(target=self.run, name="plan ui", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End all searches, and stop to listen."""
        self.jobs.stop()
        self._http.shutdown()
        self._http.server_close()


def serve(port: int, model: str | None, graph_cache: str | None, opened: Callable[[str], None]) -> None:
    """Serve the page, until Ctrl-C; `opened` is told the address. Raises RequestError where the port is taken."""
    server = Server(port=port, model=model, graph_cache=graph_cache)
    thread = server.start()
    try:
        opened(server.address)
        thread.join()
    except KeyboardInterrupt:
        server.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: "partial[Handler]") -> None:
        self.connections = Connections()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.admit(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.connections.forget(request)
        super().shutdown_request(request)
