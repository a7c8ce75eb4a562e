"""Answers to the requests of `plan ui` (`planner.ui.server` lists them)."""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.api.callers import from_command
from planner.errors import PlannerError, RequestError
from planner.plan.binding.machine import machine_of
from planner.plan.file import dump_plan
from planner.ui.content import choices, operator_content
from planner.ui.downloads import asset, bound_of, report, settings, stem
from planner.ui.jobs import Job, asked_of

if TYPE_CHECKING:
    from planner.ui.server import Server

HOST = "127.0.0.1"
PATIENCE = 10.0
"""Seconds that a request waits for news."""

_LARGEST = 2**16  # bytes of a request
_ONE = re.compile(r"/api/searches/([0-9]{1,9})(?:/([a-z.]+))?")
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_ASSETS = {"/ui.js": "text/javascript", "/ui.css": "text/css", "/style.css": "text/css"}


class _NotFoundError(Exception):
    """There is nothing at an address."""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection to a server."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "plan", ""
    timeout = 60.0

    def __init__(self, served: "Server", *connection: Any) -> None:
        self.served = served
        super().__init__(*connection)

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
                with self.served.connections.answering(self.connection), from_command():
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
            self._json({"error": f"a fault of the planner: {type(error).__name__}"}, HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def _is_local(self) -> bool:
        """Whether the request names the loopback address: a name that was bound to it does not."""
        own = {f"{HOST}:{self.served.port}", f"localhost:{self.served.port}"}
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in own and (origin is None or origin.removeprefix("http://") in own)

    def _has_token(self, asked: Mapping[str, str]) -> bool:
        given = self.headers.get("X-Plan-Token") or asked.get("token", "")
        return secrets.compare_digest(given.encode(), self.served.token.encode())

    def _get(self, path: str, asked: Mapping[str, str]) -> None:
        if path == "/":
            self._send(HTTPStatus.OK, asset("ui.html"), "text/html; charset=utf-8")
        elif path in _ASSETS:
            self._send(HTTPStatus.OK, asset(path[1:]), f"{_ASSETS[path]}; charset=utf-8")
        elif path == "/api/choices":
            self._json(choices(self.served.model))
        else:
            job, what = self._job(path)
            self._of_job(job, what, asked)

    def _of_job(self, job: Job, what: str | None, asked: Mapping[str, str]) -> None:
        if what is None:
            seen = asked.get("seen", "-1")
            self._json(job.state(int(seen) if re.fullmatch("[0-9]{1,9}", seen) else -1, PATIENCE))
        elif what == "operator":
            bound = bound_of(job)
            self._json(operator_content(bound, machine_of(bound.plan.cluster), asked.get("name", "")))
        elif what == "plan.json":
            self._download(dump_plan(bound_of(job).plan).encode(), "application/json", f"{stem(job)}.json")
        elif what == "report.html":
            self._send(HTTPStatus.OK, report(job), "text/html; charset=utf-8", policy="")
        elif what == "settings.zip":
            engine = asked.get("engine", "")
            self._download(settings(job, engine), "application/zip", f"{stem(job)}-{engine}.zip")
        else:
            raise _NotFoundError

    def _post(self, path: str, asked: Mapping[str, str]) -> None:
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _LARGEST:
            self.close_connection = True
            raise RequestError(f"a request has at most {_LARGEST} bytes")
        body = self.rfile.read(int(length))
        if path == "/api/searches":
            job = self.served.jobs.begin(asked_of(parse_json(decoded(body)), self.served.model))
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
        return self.served.jobs.job(int(found[1])), found[2]

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
