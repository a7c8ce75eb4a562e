"""The server of `plan ui`: who may ask, what is refused, and that a search goes through with all that is offered."""

import contextlib
import http.client
import io
import json
import socket
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from planner.errors import RequestError
from planner.plan.file import parse_plan
from planner.ui import Server
from planner.ui.connections import MOST, Connections
from planner.ui.jobs import Job, Models, asked_of
from tests.unit.ui.serving import serving

TINY = {"model": "llama-tiny", "hardware": "h100-80gb", "devices": 2, "global_batch": 8, "seq_len": 64}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    text = None if body is None else body if isinstance(body, str) else json.dumps(body)
    sent = {"X-Plan-Token": server.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, text, sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def asked(server: Server, method: str, path: str, body: Any = None) -> Any:
    status, content, _ = ask(server, method, path, body)
    assert status == 200, content
    return json.loads(content)


def followed(server: Server, number: int, *, until_done: bool = True) -> Any:
    seen = -1
    while True:
        state = asked(server, "GET", f"/api/searches/{number}?seen={seen}")
        seen = state["version"]
        assert not state["error"], state
        if state["done"] or (state["plan"] and state["plan"]["final"] and not until_done):
            return state


def test_only_the_address_with_its_token_is_answered(server: Server) -> None:
    assert server.address.startswith(f"http://127.0.0.1:{server.port}/?token=")
    for path in ("/", "/api/choices", "/api/searches/1", "/api/searches/1/plan.json"):
        assert ask(server, "GET", path, X_Plan_Token="wrong")[0] == 403
    assert ask(server, "POST", "/api/searches", TINY, X_Plan_Token="")[0] == 403
    assert ask(server, "GET", f"/?token={server.token}", X_Plan_Token="")[0] == 200
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}"},
        {"Origin": "http://evil.example"},
    ):
        assert ask(server, "GET", "/api/choices", **headers)[0] == 403
    status, content, headers = ask(server, "GET", "/")
    assert status == 200
    assert b"<script src=" in content
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert ask(server, "GET", "/../../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**TINY, "model": "os:system"}, "none of the zoo"),
        ({**TINY, "model": "/etc/passwd"}, "none of the zoo"),
        ({**TINY, "model": "../config.json"}, "none of the zoo"),
        ({**TINY, "hardware": "/etc/passwd"}, "give the name of a profile"),
        ({**TINY, "hardware": "mine.toml"}, "give the name of a profile"),
        ({**TINY, "devices": "two"}, "devices: give a whole number"),
        ({**TINY, "devices": True}, "devices: give a whole number"),
        ({**TINY, "pinned": {"offload": 1}}, "pinned: give numbers"),
        ({**TINY, "pinned": {"tensor": True}}, "pinned: give numbers"),
        ({**TINY, "shard": {"*": 1}}, "shard: give a strategy"),
        ({**TINY, "rule_cache": "/"}, "unknown key"),
        ({"hardware": "h100-80gb"}, "model is missing"),
        ([1], "a request is an object"),
    ],
)
def test_what_a_page_may_not_ask_is_refused(content: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        asked_of(content, None)


def test_a_model_of_ones_own_is_the_one_that_was_named_at_the_start() -> None:
    assert asked_of({**TINY, "model": "mine:factory"}, "mine:factory").model == "mine:factory"
    with pytest.raises(RequestError):
        asked_of({**TINY, "model": "mine:other"}, "mine:factory")


def test_a_search_that_is_stopped_before_it_has_a_plan_is_no_error() -> None:
    job = Job(1, asked_of(TINY, None), Models(None))
    job.stop()
    job.start()
    job.join(60)
    assert (job.done, job.phase, job.error, job.shown) == (True, "stopped", "", None)


def test_what_is_no_request_is_answered_with_a_reason(server: Server) -> None:
    for body, said in (("{", "JSON"), ("x" * 70_000, "at most"), ('{"model": 1}', "model: give text")):
        status, content, _ = ask(server, "POST", "/api/searches", body)
        assert status == 400
        assert said in json.loads(content)["error"]
    assert ask(server, "GET", "/api/searches/99999")[0] == 400
    assert ask(server, "GET", "/api/nothing")[0] == 404


@pytest.mark.slow
def test_a_search_goes_through_and_everything_is_offered_of_it(server: Server) -> None:
    found = asked(server, "GET", "/api/choices")
    assert "llama-tiny" in found["models"]
    assert "h100-80gb" in [one["name"] for one in found["hardware"]]
    pinned = {"pipeline": 1, "micro_batches": 1}
    started = asked(server, "POST", "/api/searches", {**TINY, "pinned": pinned})
    state = followed(server, started["job"])
    plan, base = state["plan"], f"/api/searches/{started['job']}"
    assert plan["final"]
    assert plan["step_seconds"] > 0
    assert [one["best"] for one in state["points"]].count(True) == 1
    assert state["points"][0]["step_seconds"] == plan["step_seconds"]
    assert [one["name"] for one in plan["pins"]] == found["pinned"]
    assert all(one["value"] in one["legal"] for one in plan["pins"])

    _, text, headers = ask(server, "GET", f"{base}/plan.json")
    assert parse_plan(text.decode()).cluster.devices == 2
    assert headers["Content-Disposition"] == 'attachment; filename="llama-tiny-2.json"'

    _, page, _ = ask(server, "GET", f"{base}/report.html")
    assert b"<!doctype html>" in page[:20].lower()

    free = next(one for one in plan["operators"] if one["free"] and one["short"].endswith("up_proj"))
    priced = asked(server, "GET", f"{base}/operator?name={free['name']}")
    assert [one["chosen"] for one in priced["choices"]].count(True) == 1
    other = next(one for one in priced["choices"] if not one["chosen"] and one["fits"])

    shard = {free["name"]: other["strategy"]}
    again = asked(server, "POST", "/api/searches", {**TINY, "pinned": pinned, "shard": shard})
    sharded = followed(server, again["job"], until_done=False)["plan"]
    assert next(one for one in sharded["operators"] if one["name"] == free["name"])["factors"] == other["strategy"]

    third = asked(server, "POST", "/api/searches", {**TINY, "pinned": {**pinned, "tensor": 2}})
    held = followed(server, third["job"], until_done=False)["plan"]
    assert next(one["value"] for one in held["pins"] if one["name"] == "tensor") == 2
    asked(server, "POST", f"/api/searches/{third['job']}/stop", {})

    status, archive, _ = ask(server, "GET", f"/api/searches/{third['job']}/settings.zip?engine=megatron")
    assert status == 200, archive
    assert "GIVEN-UP.txt" in zipfile.ZipFile(io.BytesIO(archive)).namelist()
    status, content, _ = ask(server, "GET", f"{base}/settings.zip?engine=nothing")
    assert status == 400
    assert "nothing" in json.loads(content)["error"]


def test_the_page_names_options_as_commands_do(server: Server) -> None:
    started = asked(server, "POST", "/api/searches", {**TINY, "model": "gpt2", "seq_len": 4096})
    state = asked(server, "GET", f"/api/searches/{started['job']}?seen=-1")
    while not state["done"]:
        state = asked(server, "GET", f"/api/searches/{started['job']}?seen={state['version']}")
    assert "--seq-len" in state["error"]


@pytest.mark.slow
def test_what_cannot_be_planned_is_said_on_the_page(server: Server) -> None:
    started = asked(server, "POST", "/api/searches", {**TINY, "pinned": {"tensor": 7}})
    state = asked(server, "GET", f"/api/searches/{started['job']}?seen=-1")
    while not state["done"]:
        state = asked(server, "GET", f"/api/searches/{started['job']}?seen={state['version']}")
    assert "tensor = 7" in state["error"]
    assert state["plan"] is None


def test_idle_connections_of_strangers_make_room(server: Server) -> None:
    """More than there is room for: those that have waited longest are closed, and the page is served all the same."""
    own = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"X-Plan-Token": server.token}
    own.request("GET", "/api/choices", headers=headers)
    assert own.getresponse().read()
    strangers = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(MOST + 8)]
    try:
        for number in range(9):  # the first one, and one for each that is too many, with that of the page
            assert strangers[number].recv(1) == b"", number
        assert ask(server, "GET", "/api/choices")[0] == 200
        own.request("GET", "/api/choices", headers=headers)  # shown the token: kept before strangers
        assert own.getresponse().status == 200
        assert len(server.connections) <= MOST
    finally:
        for one in (*strangers, own):
            one.close()


def test_strangers_that_send_requests_without_end_do_not_keep_the_server_busy(server: Server) -> None:
    """Each of them sends as many as fit, and reads no answer: it gets one, and the owner is answered at once."""
    request = f"GET /ui.js HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    strangers = [socket.socket() for _ in range(MOST)]
    try:
        for one in strangers:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)  # so that an answer fills it
            one.connect(("127.0.0.1", server.port))
            with contextlib.suppress(OSError):  # it is closed meanwhile
                one.sendall(request * 1000)
        began = time.monotonic()
        assert ask(server, "GET", "/api/choices")[0] == 200
        assert time.monotonic() - began < 20
    finally:
        for one in strangers:
            one.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        one.sendall(request * 2)
        answer = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close" in answer


def test_a_connection_that_is_answered_is_not_closed_for_another() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    (first, theirs), (second, _), (third, _) = pairs
    held = Connections(most=1)
    assert held.admit(first)
    with held.answering(first):
        assert not held.admit(second)
        assert len(held) == 1
    assert held.admit(third)
    assert theirs.recv(1) == b""
    held.forget(third)
    assert len(held) == 0
    for pair in pairs:
        for one in pair:
            one.close()


@pytest.mark.parametrize("port", [1, 80, 1023])
def test_ports_of_the_system_are_refused(port: int) -> None:
    with pytest.raises(RequestError, match=f"--port {port}: ports below 1024 belong to the system; give one from 1024"):
        Server(port=port)
