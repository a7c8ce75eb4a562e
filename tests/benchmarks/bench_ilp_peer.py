"""Llama 8B on 256 devices against an integer program of others, and against plans entered by hand.

The program (autoparallel on the traced joint graph) chooses placements of every operator on a mesh of 32 x 8; "same
problem" is that. Its time is in data/peers.csv.
"""

from peers import load_peers
from timing import cpu_seconds, extent

from planner import Pinned, SearchResult
from planner.api.searching import search
from planner.errors import InfeasibleError
from planner.graph.trace import trace
from planner.models.zoo import build_model

DEVICES = 256
MESH = (32, 8)
FASTER = 50.0

FULLY_SHARDED = {
    f"fully sharded, recompute {how}": Pinned(pipeline=1, data=DEVICES, context=1, zero=3, micro_batch=1, recompute=how)
    for how in ("none", "selective", "full")
}
MEGATRON = {
    f"Megatron {pipeline} x {DEVICES // pipeline // tensor} x {tensor}, {name}": Pinned(
        pipeline=pipeline,
        data=DEVICES // pipeline // tensor,
        context=1,
        tensor=tensor,
        zero=1,
        micro_batch=1,
        sequence_parallel=True,
        recompute=how,
    )
    for pipeline, tensor in ((1, 8), (1, 4), (2, 4), (4, 8))
    for how, name in (("none", "all kept"), ("selective", "selective"), ("full", "recomputed"))
}


def main() -> None:
    """Print the times, then the plans."""
    built = build_model("llama8b", dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)

    def searched(pinned: Pinned) -> SearchResult:
        return search(graph, "h100-80gb", devices=DEVICES, batch=built.batch, pinned=pinned, simplicity=0.0)

    runs = 1 if extent() == "quick" else 3
    same, _ = cpu_seconds(lambda: searched(Pinned(pipeline=1, mesh=MESH)), runs=runs)
    whole, found = cpu_seconds(lambda: searched(Pinned()), runs=runs)
    peer = next(peer for peer in load_peers() if peer.stack == "llama8b")
    assert peer.seconds is not None
    print(f"Llama 8B, {DEVICES} devices, CPU seconds of the search, median of {runs}; {peer.planner}: {peer.seconds:g}")
    for name, seconds in (("same problem", same), ("all", whole)):
        print(f"{name:<14}{seconds:>8.2f}{peer.seconds / seconds:>8.0f}x faster, target {FASTER:g}x")
    print(f"\nour estimate of a step: {found.plans[0].seconds:.3f} s, {found.plans[0].configuration}; entered by hand:")
    worse = 0
    for name, pinned in {**FULLY_SHARDED, **MEGATRON}.items():
        try:
            seconds = searched(pinned).plans[0].seconds
        except InfeasibleError:
            print(f"{name:<40}{'does not fit':>14}")
            continue
        worse += found.plans[0].seconds > seconds * (1 + 1e-9)
        print(f"{name:<40}{seconds:>12.3f} s, found / entered {found.plans[0].seconds / seconds:.3f}", flush=True)
    print(f"found is worse than {worse} of them")


if __name__ == "__main__":
    main()
