"""How worker and server prove to each other that they know the key of the run, without sending it.

    server ──> challenge    a nonce
    worker ──> hello        another nonce, its identity, and the HMAC of all that
    server ──> welcome      the HMAC of the same for the server's role; or refused, with that of a third role

Both HMACs include the server's address as each side sees it, so a relay at another address is detected. Until the hello
has been verified, frames have at most 4 KiB.
"""

import hmac
import json
import secrets
from dataclasses import dataclass

from runtime.servers.frames import Frame

BEFORE_HELLO = 2**12
"""Maximum bytes of a frame, after its prefix, before the hello has been verified."""

WORKER, SERVER, REFUSAL = "worker", "server", "refusal"
_LONGEST_PROGRAM = 256


def new_nonce() -> str:
    """A random nonce."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity that a worker claims, and its nonce."""

    worker: int | None
    program: str
    nonce: str

    @staticmethod
    def of(frame: Frame) -> "Identity":
        """The content of a hello. Raises ValueError for any other frame."""
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
    """The proof that a peer in this role knows the key: HMAC-SHA256 of both nonces, the server's address and the
    worker's identity."""
    said = ["parameter servers 2", role, *place, challenge, identity.nonce, identity.worker, identity.program]
    return hmac.digest(key.encode(), json.dumps(said).encode(), "sha256").hex()


def is_proof(given: object, wanted: str) -> bool:
    """Whether a proof is valid, compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
