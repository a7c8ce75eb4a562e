"""One process of a pool that distributed tests share (see conftest.py), forked from one that has imported `warm`."""

import importlib
import sys
import time
import traceback
from multiprocessing.connection import Connection


def work(rank: int, world: int, store: str, connection: Connection) -> None:
    """Join a gloo group through the file `store`, and run tasks until the connection closes. A task is (name of a file
    beside this one, name of a function in it, arguments); the answer is ("done", result, CPU seconds) or ("failed",
    traceback, CPU seconds)."""
    assert "tests.distributed.warm" in sys.modules, "the process that was forked could not import it"
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        try:
            module, function, arguments = connection.recv()
        except EOFError:
            return
        before = time.process_time()
        try:
            called = getattr(importlib.import_module(f"tests.distributed.{module}"), function)
            answer = ("done", called(*arguments))
        except Exception:
            answer = ("failed", traceback.format_exc())
        connection.send((*answer, time.process_time() - before))
