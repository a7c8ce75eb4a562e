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

import io
import json
import re
import secrets
import threading
import zipfile
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.errors import PlannerError, RequestError
from planner.plan.binding.machine import machine_of
from planner.plan.file import dump_plan
from planner.ui.connections import Connections
from planner.ui.content import choices, operator_content
from planner.ui.jobs import Job, Jobs, Models, asked_of

HOST = "127.0.0.1"
PATIENCE = 10.0
"""Seconds that a request waits for news."""

_FIRST_PORT = 1024  # the first one that needs no rights
_LARGEST = 2**16  # bytes of a request
_ONE = re.compile(r"/api/searches/([0-9]{1,9})(?:/([a-z.]+))?")
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_ASSETS = {"/ui.js": "text/javascript", "/ui.css": "text/css", "/style.css": "text/css"}


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
            self._http = _Http((HOST, port), _handler(self))
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

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
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


class _NotFoundError(Exception):
    """There is nothing at an address."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "plan", ""
        timeout = 60.0

        def do_GET(self) -> None:
            self._answer(self._get)

        def do_POST(self) -> None:
            self._answer(self._post)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: addresses have the token."""

        def _answer(self, method: Callable[[str, Mapping[str, str]], None]) -> None:
            if "Transfer-Encoding" in self.headers:
                self.close_connection = True  # bodies without a length are not read
            try:
                parts = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                ours = self._has_token(asked)
                if not ours:
                    self.close_connection = True  # one answer for whoever has not shown the token
                if not self._is_local() or not (ours or parts.path in _ASSETS):
                    self._send(HTTPStatus.FORBIDDEN, b"open the address that plan ui has printed\n", "text/plain")
                elif ours:
                    with server.connections.answering(self.connection):
                        method(parts.path, asked)
                else:
                    method(parts.path, asked)
            except _NotFoundError:
                self._send(HTTPStatus.NOT_FOUND, b"nothing is here\n", "text/plain")
            except (PlannerError, ForeignTextError) as error:
                self._json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # whoever asked has gone
            except ValueError as error:
                self._json({"error": f"no request: {error}"}, HTTPStatus.BAD_REQUEST)
            except Exception as error:  # a fault of ours, which the page is told
                self._json(
                    {"error": f"a fault of the planner: {type(error).__name__}"}, HTTPStatus.INTERNAL_SERVER_ERROR
                )
                raise

        def _is_local(self) -> bool:
            """Whether the request names the loopback address: a name that was bound to it does not."""
            own = {f"{HOST}:{server.port}", f"localhost:{server.port}"}
            origin = self.headers.get("Origin")
            return self.headers.get("Host") in own and (origin is None or origin.removeprefix("http://") in own)

        def _has_token(self, asked: Mapping[str, str]) -> bool:
            given = self.headers.get("X-Plan-Token") or asked.get("token", "")
            return secrets.compare_digest(given.encode(), server.token.encode())

        def _get(self, path: str, asked: Mapping[str, str]) -> None:
            if path == "/":
                self._send(HTTPStatus.OK, _asset("ui.html"), "text/html; charset=utf-8")
            elif path in _ASSETS:
                self._send(HTTPStatus.OK, _asset(path[1:]), f"{_ASSETS[path]}; charset=utf-8")
            elif path == "/api/choices":
                self._json(choices(server.model))
            else:
                job, what = self._job(path)
                self._of_job(job, what, asked)

        def _of_job(self, job: Job, what: str | None, asked: Mapping[str, str]) -> None:
            if what is None:
                seen = asked.get("seen", "-1")
                self._json(job.state(int(seen) if re.fullmatch("[0-9]{1,9}", seen) else -1, PATIENCE))
            elif what == "operator":
                bound = _bound(job)
                self._json(operator_content(bound, machine_of(bound.plan.cluster), asked.get("name", "")))
            elif what == "plan.json":
                self._download(dump_plan(_bound(job).plan).encode(), "application/json", f"{_stem(job)}.json")
            elif what == "report.html":
                self._send(HTTPStatus.OK, _report(job), "text/html; charset=utf-8", policy="")
            elif what == "settings.zip":
                engine = asked.get("engine", "")
                self._download(_settings(job, engine), "application/zip", f"{_stem(job)}-{engine}.zip")
            else:
                raise _NotFoundError

        def _post(self, path: str, asked: Mapping[str, str]) -> None:
            length = self.headers.get("Content-Length", "0")
            if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _LARGEST:
                self.close_connection = True
                raise RequestError(f"a request has at most {_LARGEST} bytes")
            body = self.rfile.read(int(length))
            if path == "/api/searches":
                job = server.jobs.begin(asked_of(parse_json(decoded(body)), server.model))
                self._json(job.state(-1, 0.0))
                return
            job, what = self._job(path)
            if what != "stop":
                raise _NotFoundError
            job.stop()
            self._json(job.state(-1, 0.0))

        def _job(self, path: str) -> tuple[Job, str | None]:
            found = _ONE.fullmatch(path)
            if found is None:
                raise _NotFoundError
            return server.jobs.job(int(found[1])), found[2]

        def _json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
            self._send(status, text.encode(), "application/json")

        def _download(self, content: bytes, kind: str, name: str) -> None:
            self._send(HTTPStatus.OK, content, kind, {"Content-Disposition": f'attachment; filename="{name}"'})

        def _send(
            self,
            status: HTTPStatus,
            content: bytes,
            kind: str,
            headers: Mapping[str, str] | None = None,
            policy: str = _POLICY,
        ) -> None:
            if status >= HTTPStatus.BAD_REQUEST:
                self.close_connection = True  # what is left of the request is none of its own
            self.send_response(status)
            guards = {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Cache-Control": "no-store",
                "Content-Security-Policy": policy + "; frame-ancestors 'none'" if policy else "frame-ancestors 'none'",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                **({"Connection": "close"} if self.close_connection else {}),
            }
            for name, value in {**guards, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _asset(name: str) -> bytes:
    house = "planner.report.html" if name == "style.css" else "planner.ui"
    return resources.files(house).joinpath("assets", name).read_bytes()


def _bound(job: Job) -> Any:
    """The plan of a search, bound. Raises RequestError before there is one."""
    if job.shown is None:
        raise RequestError("there is no plan yet")
    return job.shown.bound


def _stem(job: Job) -> str:
    plan = _bound(job).plan
    return re.sub(r"[^\w]+", "-", f"{plan.model.reference}-{plan.cluster.devices}", flags=re.ASCII).strip("-")


def _report(job: Job) -> bytes:
    from planner.report.data import report_of
    from planner.report.html import page

    bound = _bound(job)
    return page(report_of(bound, bound.plan.prediction, machine_of(bound.plan.cluster)).report).encode()


def _settings(job: Job, engine: str) -> bytes:
    """The files of an engine as a zip, with a list of what it cannot be told."""
    from planner.api.plans import export

    found = export(_bound(job).plan, engine, nearest=True)
    lost = "".join(f"{what}: {here} becomes {there}\n" for what, here, there in found.given_up)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**found.files, "GIVEN-UP.txt": lost or "nothing\n"}.items():
            archive.writestr(zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()
