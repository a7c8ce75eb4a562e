"""The fitted numbers of a profile, part by part, with their meanings and units.

They are the facts that no datasheet states: how kernels and protocols use the peaks. Values are in the units of the
profile's file, because readers compare them with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hardware_profiles.cluster import Cluster, Fact, FactKind

SHARE = "share"

_MATMUL = {
    "compute": (SHARE, "of the peak, reached by large products"),
    "bandwidth": (SHARE, "of the memory bandwidth, reached by skinny products"),
    "launch_us": ("µs", "a product that does next to nothing"),
    "feed_gb_per_s": ("GB/s", "operands from the cache into all compute units"),
    "fill": ("steps of k", "to fill and drain the pipeline of a tile"),
    "quantisation": (SHARE, "of a whole wave of tiles that a last, partial one costs"),
    "split_us": ("µs", "to cut k and add the parts up"),
    "convert_gb_per_s": ("GB/s", "read and written to bring the first operand into the dtype"),
    "clock": (SHARE, "of those rates that is left under the load of training"),
    "added": (SHARE, "of what is left that products keep whose result is added in fp32"),
}
_ATTENTION = {
    "compute": (SHARE, "of the peak, head_dim 128, long sequences"),
    "softmax": ("FLOP", "of the softmax per score, at the peak rate"),
    "fill": ("keys", "that starting a tile costs"),
    "tail": (SHARE, "of the longest tile by which compute units end apart"),
    "preparation_us": ("µs", "that the measured call does beside"),
    "passes": ("times", "the measured call reads and writes its operands beside"),
    "backward": (SHARE, "of the forward rate, backward"),
}
_SPREAD = {"spread": (SHARE, "standard deviation of log(measured / predicted)")}
_EFFICIENCY = {
    "compute": (SHARE, "of the peak, large kernels"),
    "bandwidth": (SHARE, "of the memory bandwidth, large kernels"),
}
_PROTOCOL = {
    "setup_us": ("µs", "once per collective whose outermost level this is"),
    "latency_us": ("µs", "per step over this level"),
    "efficiency": (SHARE, "of the level's bandwidth, large messages"),
    "own": (SHARE, "of a sent part that the part a device keeps costs"),
}
_DEVICE = {
    "launch_latency_us": ("µs", "the least that a kernel costs"),
    "host_latency_us": ("µs", "that the host needs to launch an operator"),
    "misaligned": ("times", "longer, a 16-bit product whose rows are no multiples of 16 bytes"),
}
_GENERATION = ("times", "longer than the best kernels of the device")
_DROPOUT = ("times", "longer than without dropout of probabilities")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One fitted number: `value` in `unit`, `part` of the machine, and its kind and source as in `Fact`."""

    part: str
    name: str
    value: float
    unit: str
    meaning: str
    kind: FactKind
    source: str


def fitted_parameters(cluster: Cluster) -> tuple[Parameter, ...]:
    """The fitted numbers of products and attention by dtype, of other op classes, and of every protocol of every level.

    Empty for a machine that was not loaded from a file, because it has no facts.
    """
    return tuple(_parameters(cluster))


def _parameters(cluster: Cluster) -> Iterator[Parameter]:
    for fact in cluster.facts:
        match fact.key.split("."):
            case ["device", "matmul", dtype, name]:
                yield _parameter(f"matmul {dtype}", name, fact, _MATMUL | _SPREAD)
            case ["device", "attention", dtype, name]:
                yield _parameter(f"attention {dtype}", name, fact, _ATTENTION | _SPREAD)
            case ["device", "efficiency", op_class, name]:
                yield _parameter(f"class {op_class}", name, fact, _EFFICIENCY)
            case ["device", name] if name in _DEVICE:
                yield _parameter("kernels", name, fact, _DEVICE)
            case ["device", "generations", name]:
                yield _parameter("older attention", name, fact, {name: _GENERATION})
            case ["device", "dropout", name]:
                yield _parameter("dropout in attention", name, fact, {name: _DROPOUT})
            case ["level", index, "protocol", number, name]:
                level = cluster.levels[int(index)]
                yield _parameter(f"{level.name} {level.protocols[int(number)].name}", name, fact, _PROTOCOL)
            case ["level", index, "in_network", name]:
                level = cluster.levels[int(index)]
                assert level.in_network is not None
                yield _parameter(f"{level.name} {level.in_network.name}", name, fact, _PROTOCOL)


def _parameter(part: str, key: str, fact: Fact, known: dict[str, tuple[str, str]]) -> Parameter:
    unit, meaning = known[key]  # a test finds keys that the schema has and this file lacks
    name = key.removesuffix("_us").removesuffix("_gb_per_s")
    return Parameter(
        part=part, name=name, value=fact.value, unit=unit, meaning=meaning, kind=fact.kind, source=fact.source
    )
