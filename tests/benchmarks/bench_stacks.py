"""Stacks of equal layers against the search of MindSpore: CPU seconds of the search alone.

"Same problem" is what MindSpore searches: the strategies of every operator on all devices, without a pipeline and with
one micro-batch. "All" is everything that `planner.search` chooses by itself: stages, micro-batches, recomputation too.
"""

from functools import cache

from peers import Peer, load_peers
from stacks import GPT_BATCH, MLP_BATCH, gpt_stack, mlp_stack
from timing import cpu_seconds, extent

from planner import Pinned, SearchResult
from planner.api.searching import search
from planner.errors import PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace

STACKS = {"mlp": (mlp_stack, MLP_BATCH), "gpt": (gpt_stack, GPT_BATCH)}
LAYERS = (1, 2, 4, 8, 16, 32)
DEVICES = (8, 64)
PROFILE = "a100-80gb"
SAME_PROBLEM = Pinned(pipeline=1, micro_batches=1)
ALL = Pinned()
RUNS = 3
FASTER = 100.0  # than dynamic_programming of MindSpore on the GPT of 8 layers for 8 devices


@cache
def graph_of(stack: str, layers: int) -> OperatorGraph:
    module, example = STACKS[stack][0](layers)
    return trace(module, (example,), {})


def searched(stack: str, layers: int, devices: int, pinned: Pinned, algorithm: str) -> tuple[float, SearchResult]:
    """CPU seconds, the median of some runs, and the result."""
    batch = STACKS[stack][1]
    graph = graph_of(stack, layers)
    return cpu_seconds(
        lambda: search(
            graph,
            PROFILE,
            devices=devices,
            batch=batch,
            global_batch=batch,
            pinned=pinned,
            search=algorithm,
            simplicity=0.0,
        ),
        runs=RUNS,
    )


def exact(layer_counts: tuple[int, ...]) -> None:
    """A line for every stack, number of layers and number of devices."""
    peers = {(p.stack, p.layers, p.devices): p for p in load_peers() if p.algorithm == "dynamic_programming"}
    print(f"dynamic_programming, CPU seconds, median of {RUNS}")
    print(
        f"{'stack':<6}{'layers':>7}{'devices':>8}{'same problem':>14}{'all':>8}{'gap':>8}{'MindSpore':>11}{'faster':>8}"
    )
    for stack in STACKS:
        for layers in layer_counts:
            for devices in DEVICES:
                same, _ = searched(stack, layers, devices, SAME_PROBLEM, "dynamic_programming")
                whole, found = searched(stack, layers, devices, ALL, "dynamic_programming")
                peer = peers.get((stack, layers, devices))
                line = f"{stack:<6}{layers:>7}{devices:>8}{same:>14.3f}{whole:>8.3f}{found.gap:>8.2%}"
                print(line + (_against(peer, same) if peer is not None else ""), flush=True)
    print(f"target: {FASTER:g} times faster on the GPT of 8 layers for 8 devices, and done for 64\n")


def _against(peer: Peer, seconds: float) -> str:
    if peer.seconds is None:
        return f"{'> 900':>11}"
    return f"{peer.seconds:>11g}{peer.seconds / seconds:>7.0f}x"


def recursive() -> None:
    """The heuristic beside the measured one, where both know the problem."""
    print(f"recursive_programming, CPU seconds, median of {RUNS}; target: no slower than MindSpore's")
    print(f"{'stack':<6}{'layers':>7}{'devices':>8}{'same problem':>14}{'MindSpore':>11}{'ratio':>8}")
    for peer in load_peers():
        if peer.algorithm != "recursive_programming" or peer.seconds is None:
            continue
        line = f"{peer.stack:<6}{peer.layers:>7}{peer.devices:>8}"
        try:
            where = peer.stack, peer.layers, peer.devices, SAME_PROBLEM
            seconds, found = searched(*where, peer.algorithm)
            _, best = searched(*where, "dynamic_programming")
        except PlannerError as error:
            print(f"{line}{'not available':>14}  {error}")
            continue
        alike = work(found) == work(best)
        note = "  (did exactly what dynamic_programming does)" if alike else ""
        print(f"{line}{seconds:>14.3f}{peer.seconds:>11g}{seconds / peer.seconds:>8.2f}{note}", flush=True)


def work(result: SearchResult) -> tuple[object, ...]:
    """What a search did, without the time that it took."""
    done = result.statistics
    return done.configurations, done.evaluated, done.solved, result.bound_seconds, result.plans[0].seconds


def main() -> None:
    """Print both tables."""
    exact((1, 8, 32) if extent() == "quick" else LAYERS)
    recursive()


if __name__ == "__main__":
    main()
