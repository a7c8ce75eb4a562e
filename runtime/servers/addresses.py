"""The addresses of a run's servers for its workers: files in a folder that all of them see, or a list.

FOLDER/key             the secret that a worker needs; readable for its owner alone
FOLDER/server-0.at     host and port; rewritten when a server is restarted, which may change its port
"""

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from planner.errors import RequestError
from runtime.servers.private_files import make_folder, read_secret, write_aside, write_new

_LARGEST = 2**12  # maximum bytes of an address
_KEY_BYTES = 16
_LONGEST_HOST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """`count` servers whose addresses are in `folder`, or in `fixed`, one HOST:PORT each."""

    folder: Path
    count: int
    fixed: tuple[str, ...] = ()

    def of(self, server: int) -> tuple[str, int] | None:
        """The current address of a server; None where it is not known yet. Raises RequestError for an invalid
        address."""
        if self.fixed:
            return parse_address(self.fixed[server])
        try:
            with address_file(self.folder, server).open("rb") as file:
                return parse_address(file.read(_LARGEST).decode(errors="replace"))
        except FileNotFoundError:
            return None

    def key(self) -> str:
        """The run's key. Raises RequestError where there is no such run, or its key is invalid."""
        try:
            return _read_key(self.folder / "key")
        except OSError as error:
            raise RequestError(
                f"no servers run in {self.folder}: {error.strerror} (key); start them first: python -m runtime.servers"
                f" {self.folder} --servers {self.count}"
            ) from error


def address_file(folder: Path, server: int) -> Path:
    """The file with a server's address."""
    return folder / f"server-{server}.at"


def publish(folder: Path, server: int, address: tuple[str, int]) -> None:
    """Write a server's address."""
    path = address_file(folder, server)
    write_aside(path, f"{address[0]}:{address[1]}".encode()).replace(path)


def make_key(folder: Path) -> str:
    """The key of a run, created where there is none. Raises RequestError where others can read it, or it is invalid."""
    make_folder(folder)
    path = folder / "key"
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another server was faster
            write_new(path, secrets.token_hex(_KEY_BYTES).encode())
    return _read_key(path)


def _read_key(path: Path) -> str:
    """A key in the form in which we write it: any other content, such as an empty file, could be guessed."""
    key = read_secret(path)
    if not re.fullmatch(f"[0-9a-f]{{{2 * _KEY_BYTES}}}", key):
        raise RequestError(
            f"{path} has {len(key)} characters and is no key of {2 * _KEY_BYTES} hexadecimal digits; delete it on all"
            " hosts, and start the servers again: they make another one"
        )
    return key


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises RequestError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not _is_host(host) or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise RequestError(f"'{text.strip():.80}' is no address of a server; write HOST:PORT")
    return host, int(port)


def _is_host(host: str) -> bool:
    """Whether this may be the name or the address of a host; anything else is not passed to the resolver."""
    try:
        return 0 < len(host.encode("idna")) <= _LONGEST_HOST and host.isprintable() and " " not in host
    except UnicodeError:
        return False
