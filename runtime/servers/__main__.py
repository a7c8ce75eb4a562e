"""`python -m runtime.servers FOLDER --servers 2`: parameter servers by hand; see docs/parameter-servers.md.

Without --number it starts all servers on this machine, and restarts those that die, until it is stopped. With --number
it is one server, for servers on several machines. `python -m runtime.servers certificate FOLDER` makes the certificate
that those need for encryption.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlannerError, RequestError
from runtime.servers.addresses import address_file, make_key, parse_address, publish
from runtime.servers.certificate import make_certificate
from runtime.servers.fleet import Fleet
from runtime.servers.serve import LOOPBACK, Server, storage_of


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["certificate"]:
            return _certificate(words[1:])
        given = _parser().parse_args(words)
        _check(given)
        return _all(given) if given.number is None else _one(given)
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'python -m runtime.servers'}: {error.strerror or error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.servers", description="Parameter servers of a run.")
    parser.add_argument("folder", type=Path, help="where servers keep their files and workers find them")
    parser.add_argument("--servers", type=int, required=True, help="how many there are")
    parser.add_argument("--number", type=int, help="be this one of them, the first is 0 (default: start all)")
    parser.add_argument("--listen", default=f"{LOOPBACK}:0", help="HOST:PORT of --number (default: loopback, any port)")
    parser.add_argument("--flush", action="store_true", help="every record is on the disk before it is acknowledged")
    parser.add_argument(
        "--repair", action="store_true", help="go on with what stands before the damage of a log, which is kept aside"
    )
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


def _certificate(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.servers certificate", description="Make the certificate that servers and workers share."
    )
    parser.add_argument("folder", type=Path, help="the folder of the servers")
    folder = parser.parse_args(words).folder
    try:
        path = make_certificate(folder)
    except OSError as error:
        raise RequestError(
            f"no certificate can be written into {folder}: {error.strerror}; give a folder of yours"
        ) from error
    sys.stdout.write(f"{path}\n")
    return 0


def _check(given: argparse.Namespace) -> None:
    if given.servers < 1:
        raise RequestError(f"--servers {given.servers}: give 1 or more")
    if given.number is not None and not 0 <= given.number < given.servers:
        raise RequestError(f"--number {given.number} of {given.servers} servers: from 0 to {given.servers - 1}")
    if given.number is None and given.listen != f"{LOOPBACK}:0":
        raise RequestError("--listen is for one server: give its --number")


def _all(given: argparse.Namespace) -> int:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with Fleet(given.folder, given.servers, flushed=given.flush, repaired=given.repair) as fleet:
        sys.stdout.write(f"{given.servers} servers in {given.folder}\n")
        sys.stdout.flush()
        while not stopped.wait(1.0):
            fleet.check()
    return 0


def _one(given: argparse.Namespace) -> int:
    address, key = parse_address(given.listen), make_key(given.folder)
    ended = threading.Event()
    if given.with_parent:
        threading.Thread(target=_follow, args=(ended,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    storage = storage_of(
        given.folder, given.number, given.servers, flushed=given.flush, repaired=given.repair, say=_say
    )
    storage.lock()
    address_file(given.folder, given.number).unlink(missing_ok=True)
    server = Server(storage, key, address, folder=given.folder, say=_say)
    publish(given.folder, given.number, server.address)
    try:
        server.serve(lambda: not ended.is_set())
    finally:
        server.close()
    return 0


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # its log may be on the full disk
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def _follow(ended: threading.Event) -> None:
    """End when stdin closes: the process that started this one holds its other end."""
    while os.read(0, 1):
        pass
    ended.set()


if __name__ == "__main__":
    sys.exit(main())
