"""Processes that were started again agree on a name for this attempt, in a store that is full of what dead ones wrote.

    rank r     hello/r  = a number drawn at random                  until roll names it: ack/r = the token of the roll
    rank 0     roll     = a token drawn at random, all hellos       until every ack/r is the token

Whatever an earlier attempt left is harmless: a roll of a dead rank 0 does not name the number that a living rank has
just drawn, and an ack of a dead rank is of another token. A roll that named a number of a dead rank is written again
once the living one has said hello. So rank 0 goes on only when all processes of this attempt have answered it, and each
of them only with the token of a rank 0 that has heard it: a token is shared by processes that were alive together, or
by none.

Agents of torchrun count restarts each for itself (an agent whose processes were healthy counts none), so that their
counts are no such name.
"""

import secrets
import time
from collections.abc import Callable, Iterable

from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout

from hardware_profiles import Seconds
from planner.errors import RunError

_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.2
"""Seconds between two looks at the store: short at first, as most agree at once."""


def agreed_attempt(store: Store, rank: int, world: int, timeout: Seconds | None = None) -> str:
    """The token of this attempt, the same on all `world` ranks that take part in it. Raises RunError where they have
    not come together within `timeout` seconds, by default those that torch gives a process group."""
    limit = default_pg_timeout.total_seconds() if timeout is None else timeout
    own = secrets.token_hex(8)
    if world == 1:
        return own
    store.set(f"hello/{rank}", own)
    if rank:
        token = _until(lambda: _named(store, rank, own), limit, "rank 0 has not answered")
        store.set(f"ack/{rank}", token)
        return token
    written: list[str] = []

    def answered() -> str | None:
        hellos = _all(store, "hello", range(world))
        if None not in hellos and hellos != written:
            written[:] = [hello or "" for hello in hellos]
            store.set("roll", " ".join((own, *written)))
        return own if written and all(ack == own for ack in _all(store, "ack", range(1, world))) else None

    return _until(answered, limit, f"not all of {world} processes have come")


def _named(store: Store, rank: int, own: str) -> str | None:
    """The token of a roll that names what this rank has drawn."""
    if not store.check(["roll"]):
        return None
    token, *hellos = store.get("roll").decode().split()
    return token if rank < len(hellos) and hellos[rank] == own else None


def _all(store: Store, word: str, ranks: Iterable[int]) -> list[str | None]:
    """What ranks have written last under a word."""
    keys = [f"{word}/{rank}" for rank in ranks]
    if store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _until(found: Callable[[], str | None], limit: Seconds, what: str) -> str:
    ends, wait = time.monotonic() + limit, _FIRST_WAIT
    while (token := found()) is None:
        if time.monotonic() > ends:
            raise RunError(f"{what} within {limit:g} s of this attempt; see what the other processes say")
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return token
