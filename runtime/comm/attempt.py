"""Restarted processes agree on a name for this attempt, in a store that still has the entries of dead processes.

    rank r   hello/r = a number drawn at random    if named by roll: ack/r = the roll's token; done when go is it
    rank 0   roll    = a new token, all hellos     again if a hello has changed; go = the token when every ack/r is

Entries of earlier attempts are harmless: a roll of a dead rank 0 does not name the number that a living rank has just
drawn, and an ack of a dead rank has another token. If a roll named the number of a dead rank, it is written again with
another token once the living rank has said hello. So no process continues before all processes of this attempt have
answered one roll: only processes that were alive together share a token, and the successor of a process never finds
what that process wrote under its token before it died.

The restart counts of torchrun's agents cannot serve as such a name: each agent counts for itself, and an agent whose
processes were healthy counts none.
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
"""Seconds between two reads of the store: short at first, because most attempts agree at once."""


def agreed_attempt(store: Store, rank: int, world: int, timeout: Seconds | None = None) -> str:
    """The token of this attempt, the same on all `world` ranks that take part in it. Raises RunError if they do not
    agree within `timeout` seconds (default: torch's timeout of a process group)."""
    limit = default_pg_timeout.total_seconds() if timeout is None else timeout
    own = secrets.token_hex(8)
    if world == 1:
        return own
    store.set(f"hello/{rank}", own)
    if rank:
        return _until(_Member(store, rank, own).agreed, limit, "rank 0 has not answered, or another rank has not")
    return _until(_Caller(store, world, own).agreed, limit, f"not all {world} processes have joined")


@dataclass(slots=True)
class _Caller:
    """Rank 0, which writes the roll."""

    store: Store
    world: int
    own: str
    token: str = ""
    named: list[str | None] = field(default_factory=list)

    def agreed(self) -> str | None:
        """The token of a roll that all ranks have answered; writes a new roll where other ranks have come than it
        names."""
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
        """The token of the last roll that names this rank, once all ranks have answered it."""
        token = _named(self.store, self.rank, self.own)
        if token is None:
            return None
        if token != self.answered:
            self.store.set(f"ack/{self.rank}", token)
            self.answered = token
        return token if self.store.check(["go"]) and self.store.get("go").decode() == token else None


def _named(store: Store, rank: int, own: str) -> str | None:
    """The token of the roll, if it names the number that this rank has drawn."""
    if not store.check(["roll"]):
        return None
    token, *hellos = store.get("roll").decode().split()
    return token if rank < len(hellos) and hellos[rank] == own else None


def _all(store: Store, word: str, ranks: Iterable[int]) -> list[str | None]:
    """The last values that the ranks have written under a key."""
    keys = [f"{word}/{rank}" for rank in ranks]
    if store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _until(found: Callable[[], str | None], limit: Seconds, what: str) -> str:
    ends, wait = time.monotonic() + limit, _FIRST_WAIT
    while (token := found()) is None:
        if time.monotonic() > ends:
            raise RunError(f"{what} within {limit:g} s of this attempt; see the output of the other processes")
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return token
