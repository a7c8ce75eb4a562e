"""One process of a proof: `python -m runtime.proving REQUEST --notes FOLDER`.

The request is a JSON file from the process that started this one: the files of the small plans, the graphs of their
models (an empty text for one that must be traced), which of them run in float64, the model where the user named it, the
parameter servers, and the file for the first rank's results.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hardware_profiles.foreign import parse_json, read_text
from planner.plan.carried import own_graph
from planner.plan.file import load_plan
from planner.plan.writing import write_atomically
from runtime.comm.device_mesh import Communicators, start_processes
from runtime.processes.rank import At, Joined, be_a_rank
from runtime.proving.comparing import addresses, compared
from runtime.proving.differences import Differences

TIMEOUT = 120.0
"""Seconds without progress after which a proof is ended."""

PHASE = "phase: "
"""Prefix of the lines in which the first rank says what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """See the head of this file. `model` is the user's argument, None for a model of the zoo."""

    plans: tuple[str, ...]
    graphs: tuple[str, ...]
    exact: tuple[bool, ...]
    model: str | None
    servers: int
    server_folder: str | None
    answer: str

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Request":
        content = parse_json(read_text(path))
        return Request(**{**content, **{name: tuple(content[name]) for name in ("plans", "graphs", "exact")}})


def read_answer(path: Path) -> tuple[Differences, ...]:
    """The first rank's results, for each of the plans."""
    return tuple(Differences(**one) for one in parse_json(read_text(path)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.proving")
    parser.add_argument("request", type=Path)
    parser.add_argument("--notes", required=True)
    given = parser.parse_args(arguments)
    request = Request.read(given.request)
    return be_a_rank(lambda at, joined: _work(request, at, joined), given.notes, TIMEOUT)


def _work(request: Request, at: At, joined: Joined) -> int:
    torch.set_num_threads(1)
    joined(start_processes(torch.device("cpu"), TIMEOUT))
    known, found = Communicators(TIMEOUT), []
    servers = addresses(request.server_folder, request.servers)
    given = zip(request.plans, request.graphs, request.exact, strict=True)
    for number, (path, text, exact) in enumerate(given, start=1):
        at(f"training {Path(path).name} beside the unsharded model")
        if dist.get_rank() == 0:
            print(f"{PHASE}running in {Path(path).stem} ({number} of {len(request.plans)})", flush=True)
        graph = own_graph(text).graph if text else None
        found.append(compared(load_plan(path), request.model, known, servers, graph, exact=exact))
    if dist.get_rank() == 0:
        write_atomically(Path(request.answer), json.dumps([asdict(one) for one in found if one is not None]))
    at("ending")
    dist.barrier()
    dist.destroy_process_group()
    return 0
