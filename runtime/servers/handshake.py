"""How worker and server prove to each other that they know the key of the run, without saying it.

    server ──> challenge    a number used once
    worker ──> hello        another one, who it is, and the HMAC of all that
    server ──> welcome      the HMAC of the same for its own role; or refused, with that of a third role

Both HMACs cover the address of the server as either side sees it: whoever listens where a server was, and passes on
what it hears, is found out. Until the hello is found right, frames have 4 KiB at most.
"""

import hmac
import json
import secrets
from dataclasses import dataclass

from runtime.servers.frames import Frame

BEFORE_HELLO = 2**12
"""Bytes of a frame, behind its prefix, before the hello was found right."""

WORKER, SERVER, REFUSAL = "worker", "server", "refusal"
_LONGEST_PROGRAM = 256


def new_nonce() -> str:
    """A number used once."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a worker says it is, and its own nonce."""

    worker: int | None
    program: str
    nonce: str

    @staticmethod
    def of(frame: Frame) -> "Identity":
        """What a hello says. Raises ValueError for a frame that is none."""
        worker, program, nonce = (frame.fields.get(name) for name in ("worker", "program", "nonce"))
        if (
            frame.kind != "hello"
            or not (worker is None or (type(worker) is int and 0 <= worker < 2**31))
            or not (isinstance(program, str) and len(program) <= _LONGEST_PROGRAM)
            or not (isinstance(nonce, str) and len(nonce) == len(new_nonce()))
        ):
            raise ValueError("this is no hello")
        return Identity(worker=worker, program=program, nonce=nonce)


def proof(key: str, role: str, place: tuple[str, int], challenge: str, identity: Identity) -> str:
    """What proves that one in this role knows the key: HMAC-SHA256 of both nonces, the server's address and who the
    worker is."""
    said = ["parameter servers 2", role, *place, challenge, identity.nonce, identity.worker, identity.program]
    return hmac.digest(key.encode(), json.dumps(said).encode(), "sha256").hex()


def is_proof(given: object, wanted: str) -> bool:
    """Whether a proof is right, compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
