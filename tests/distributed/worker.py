"""One process of the pool that all distributed tests share (see conftest.py). Run as a script:

    python worker.py RANK WORLD STORE ADDRESS

It joins a gloo group through the file STORE, connects to ADDRESS, and runs tasks until the connection closes. A
task is (path of a file beside this one, name of a function in it, arguments); the answer is ("done", result, CPU
seconds) or ("failed", traceback, CPU seconds).
"""

import importlib
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path


def main(rank: int, world: int, store: str, address: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    with Client(address, family="AF_UNIX") as connection:
        connection.send(rank)
        while True:
            try:
                module, function, arguments = connection.recv()
            except EOFError:
                return
            before = time.process_time()
            try:
                answer = ("done", getattr(importlib.import_module(module), function)(*arguments))
            except Exception:
                answer = ("failed", traceback.format_exc())
            connection.send((*answer, time.process_time() - before))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
