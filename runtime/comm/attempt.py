"""Processes that were started again agree on a name for this attempt, in a store that is full of what dead ones wrote.

    rank r   hello/r = a number drawn at random    where roll names it: ack/r = the token of the roll; on, when go is it
    rank 0   roll    = a new token, all hellos     again where a hello has changed; go = the token when every ack/r is

Whatever an earlier attempt left is harmless: a roll of a dead rank 0 does not name the number that a living rank has
just drawn, and an ack of a dead rank is of another token. A roll that named a number of a dead rank is written again,
with another token, once the living one has said hello. So nobody goes on before all processes of this attempt have
answered one roll: a token is shared by processes that were alive together, or by none, and nothing that one of them
wrote under it before it died is found by its successor.

Agents of torchrun count restarts each for itself (an agent whose processes were healthy counts none), so that their
counts are no such name.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
        return _until(_Member(store, rank, own).agreed, limit, "rank 0 has not answered, or not all others")
    return _until(_Caller(store, world, own).agreed, limit, f"not all of {world} processes have come")


@dataclass(slots=True)
class _Caller:
    """Rank 0, which calls the roll."""

    store: Store
    world: int
    own: str
    token: str = ""
    named: list[str | None] = field(default_factory=list)

    def agreed(self) -> str | None:
        """The token of a roll that all ranks have answered; a new roll where others have come than it names."""
        hellos = _all(self.store, "hello", range(self.world))
        if None in hellos:
            return None
        if hellos != self.named:
            self.token, self.named = secrets.token_hex(8), hellos
            self.store.set("roll", " ".join((self.token, *map(str, hellos))))
        if any(ack != self.token for ack in _all(self.store, "ack", range(1, self.world))):
            return None
        self.store.set("go", self.token)
        return self.token


@dataclass(slots=True)
class _Member:
    """Any other rank."""

    store: Store
    rank: int
    own: str
    answered: str = ""

    def agreed(self) -> str | None:
        """The token of the last roll that names this rank, once all have answered that."""
        token = _named(self.store, self.rank, self.own)
        if token is None:
            return None
        if token != self.answered:
            self.store.set(f"ack/{self.rank}", token)
            self.answered = token
        return token if self.store.check(["go"]) and self.store.get("go").decode() == token else None


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
