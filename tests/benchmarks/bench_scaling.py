"""How the search grows with layers and with devices: CPU seconds of `planner.search` on a traced graph."""

import math
from collections.abc import Sequence

import numpy as np
from timing import cpu_seconds, extent

from planner.api.searching import search
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace

LAYERS = (8, 32, 80, 126)
LAYERS_DEVICES = 64
FLAT_WITHIN = 1.5

DEVICES = tuple(2**power for power in range(3, 15))
BETWEEN = (24, 96, 768, 6144)  # three times a power of two, which divide in more ways
EXPONENT = 0.5

BATCH = 2  # samples of the traced example


def llama(size: str, layers: int | None = None) -> OperatorGraph:
    """A Llama of the zoo, with another number of layers where one is given."""
    import torch

    from planner.models.llama import Llama, LlamaConfig
    from planner.models.zoo import ZOO

    dimensions = dict(ZOO[size].dimensions)
    if layers is not None:
        dimensions["num_layers"] = layers
    with torch.device("meta"):
        module = Llama(LlamaConfig(**dimensions)).bfloat16()  # type: ignore[arg-type]
        tokens = torch.zeros(BATCH, int(dimensions["sequence_length"]), dtype=torch.int64)
    return trace(module, (tokens, tokens.clone()), {})


def searched(graph: OperatorGraph, devices: int, runs: int) -> float:
    """CPU seconds of a search; the line of the table is printed."""
    seconds, found = cpu_seconds(
        lambda: search(graph, "h100-80gb", devices=devices, batch=BATCH, simplicity=0.0), runs=runs
    )
    done = found.statistics
    print(f"{seconds:>9.2f}{done.evaluated:>11}{done.configurations:>16}{found.gap:>9.2%}", flush=True)
    return seconds


def against_layers(runs: int) -> None:
    """One width, more and more layers."""
    print(f"layers of a Llama of 70B's width, {LAYERS_DEVICES} devices, median of {runs}")
    print(f"{'layers':>7}{'CPU s':>9}{'evaluated':>11}{'configurations':>16}{'gap':>9}")
    seconds = []
    for layers in LAYERS:
        graph = llama("llama70b", layers)
        print(f"{layers:>7}", end="")
        seconds.append(searched(graph, LAYERS_DEVICES, runs))
    ratio = max(seconds) / min(seconds)
    print(
        f"slowest / fastest {ratio:.2f}, target {FLAT_WITHIN}; 126 layers / 8 layers {seconds[-1] / seconds[0]:.2f}\n"
    )


def against_devices(counts: Sequence[int], runs: int) -> None:
    """One model, more and more devices, 4 samples a step on each."""
    print(f"Llama 8B, 4 samples a step on each device, median of {runs}")
    print(f"{'devices':>7}{'CPU s':>9}{'evaluated':>11}{'configurations':>16}{'gap':>9}")
    graph = llama("llama8b")
    measured = {}
    for count in counts:
        print(f"{count:>7}", end="")
        measured[count] = searched(graph, count, runs)
    powers = [count for count in counts if math.log2(count).is_integer()]
    for name, chosen in (("powers of two", powers), ("all", counts)):
        print(f"seconds ~ devices ^ {exponent(chosen, [measured[n] for n in chosen]):.2f} ({name}), target {EXPONENT}")


def exponent(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])


def main() -> None:
    """Print both tables."""
    runs = 3 if extent() == "full" else 1
    against_layers(runs)
    against_devices(DEVICES[::3] if extent() == "quick" else sorted((*DEVICES, *BETWEEN)), runs)


if __name__ == "__main__":
    main()
