"""Processes that are started again agree on an attempt, whatever dead ones have left in the store."""

import random
import threading
import time

import pytest
import torch.distributed as dist

from planner.errors import RunError
from runtime.comm.attempt import agreed_attempt
from tests.refusals import refused


def together(store: dist.Store, world: int, delays: list[float]) -> list[str]:
    """The tokens of all ranks, each of which comes after its delay."""
    found = [""] * world

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        found[rank] = agreed_attempt(store, rank, world, timeout=20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_attempt_has_a_token_of_its_own(world: int) -> None:
    """Ranks come in any order, over what attempts before have left."""
    store, drawn, seen = dist.HashStore(), random.Random(world), set[str]()
    for _ in range(6):
        tokens = together(store, world, [drawn.choice((0.0, 0.01, 0.05)) for _ in range(world)])
        assert len(set(tokens)) == 1, tokens
        assert tokens[0] not in seen
        seen.add(tokens[0])


def test_ranks_that_died_on_the_way_do_no_harm() -> None:
    """Rank 0 of a first attempt has written its roll, and ranks 0 and 2 said hello, when all of them died."""
    store = dist.HashStore()
    with refused(RunError, "not all 3 processes have joined"):
        agreed_attempt(store, 0, 3, timeout=0.05)
    with refused(RunError, "rank 0 has not answered"):
        agreed_attempt(store, 2, 3, timeout=0.05)
    store.set("hello/1", "dead")
    with refused(RunError, "not all 3 processes have joined"):
        agreed_attempt(store, 0, 3, timeout=0.05)  # now its roll is there, which names the dead
    assert len(set(together(store, 3, [0.05, 0.0, 0.02]))) == 1


def test_nobody_goes_on_before_all_have_answered() -> None:
    """Rank 2 has answered a roll that named a dead rank 1, and died: its token is of no attempt."""
    store, found = dist.HashStore(), list[str]()
    store.set("hello/1", "dead")
    caller = threading.Thread(target=lambda: found.append(agreed_attempt(store, 0, 3, timeout=20.0)))
    caller.start()
    with refused(RunError, "rank 0 has not answered, or another rank has not"):
        agreed_attempt(store, 2, 3, timeout=0.5)
    answered = store.get("ack/2").decode()
    others = [threading.Thread(target=lambda r=rank: found.append(agreed_attempt(store, r, 3))) for rank in (1, 2)]
    for thread in others:
        thread.start()
    for thread in (caller, *others):
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert answered not in found
