"""Writing a profile file: the inverse of `load_profile`, for a machine whose numbers were measured or fitted.

The caller states the origin of every number by its path in the file. A number without an origin is refused, so no
number gets into a file without its source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hardware_profiles.cluster import Cluster, FactKind
from hardware_profiles.errors import InvalidProfileError
from hardware_profiles.host import Host
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.load import parse_profile
from hardware_profiles.network import Level, Protocol
from hardware_profiles.units import (
    TERA,
    gb_per_s_from_bytes_per_second,
    gib_from_bytes,
    us_from_seconds,
)

if TYPE_CHECKING:
    from tomlkit.items import InlineTable

Value: TypeAlias = "str | int | float | list[Table] | Table"
Table: TypeAlias = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source and kind of a number."""

    source: str
    kind: FactKind


def dump_profile(cluster: Cluster, origins: Mapping[str, Origin], comment: str) -> str:
    """The text of a profile file for a cluster, such as `plan calibrate` has fitted.

    It reads back to an equal cluster up to rounding, with one unit of the innermost level in use.

    Args:
        cluster: the cluster.
        origins: by the beginning of a number's path in the file ("device.efficiency.copy"); the longest match counts.
        comment: the comment at the top of the file.

    Raises:
        InvalidProfileError: a number without an origin, a value that no profile may have, or a power limit whose watts
            are in none of the cluster's facts.
    """
    import tomlkit

    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line))
    document.add(tomlkit.nl())
    document["schema_version"] = 1
    document["id"] = cluster.name
    document["device"] = _sourced("device", dict(_device(cluster)), origins)
    document["level"] = [
        _sourced(f"level.{index}", _level(level), origins) for index, level in enumerate(cluster.levels)
    ]
    if cluster.host is not None:
        document["host"] = _sourced("host", dict(_host(cluster.host)), origins)
    text = tomlkit.dumps(document)
    parse_profile(text.encode(), cluster.name)
    return text


def dump_tables(content: Mapping[str, Any], comment: str) -> str:
    """The text of plain tables in the form of a profile file, with each number and its source on one line."""
    import tomlkit

    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line))
    document.add(tomlkit.nl())
    for key, value in content.items():
        document[key] = _inline(value)
    return tomlkit.dumps(document)


def _inline(value: Any) -> Any:
    """Plain values, with each number and its source as an inline table."""
    from tomlkit import inline_table

    if isinstance(value, list):
        return [_inline(item) for item in value]
    if not isinstance(value, dict):
        return value
    found: Any = inline_table() if "value" in value or ("form" in value and len(value) == 1) else {}
    for key, item in value.items():
        found[key] = _inline(item)
    return found


def _device(cluster: Cluster) -> Iterator[tuple[str, Value]]:
    device = cluster.device
    yield "name", device.name
    yield "device_type", device.device_type
    yield "memory_gib", gib_from_bytes(device.memory if device.installed is None else device.installed)
    if device.installed is not None:
        yield "usable_gib", gib_from_bytes(device.memory)
    yield "reserved_gib", gib_from_bytes(device.reserved)
    yield "allocator_slack", device.allocator_slack
    yield "memory_bandwidth_gb_per_s", gb_per_s_from_bytes_per_second(device.memory_bandwidth)
    yield "launch_latency_us", us_from_seconds(device.launch_latency)
    if device.host_latency:
        yield "host_latency_us", us_from_seconds(device.host_latency)
    yield "compute_units", device.compute_units
    if device.communication_units:
        yield "communication_units", device.communication_units
    if device.misaligned != 1:
        yield "misaligned", device.misaligned
    if device.power_share != 1:
        yield "power", _power(cluster)
    if device.generations:
        yield "generations", dict(device.generations)
    if device.dropout is not None:
        yield "dropout", dict(zip(("forward", "backward"), device.dropout, strict=True))
    yield "peak_tflops", {dtype: value / TERA for dtype, value in device.peak_flops}
    yield (
        "efficiency",
        {name: {"compute": item.compute, "bandwidth": item.bandwidth} for name, item in device.efficiencies},
    )
    yield "matmul", {dtype: _matmul(kernel) for dtype, kernel in device.matmul_kernels}
    yield "attention", {dtype: _attention(kernel) for dtype, kernel in device.attention_kernels}


def _power(cluster: Cluster) -> Table:
    """The limit and that of the board in W, of which a device knows the quotient."""
    known = {fact.key: fact.value for fact in cluster.facts}
    limit, board = (known.get(f"device.power.{name}", 0.0) for name in ("limit_w", "board_w"))
    if not board or limit / board != cluster.device.power_share:
        raise InvalidProfileError(
            f"{cluster.name}: device.power: the power limit is {cluster.device.power_share:.6g} of that of the board,"
            " and no fact says how many watts these are"
        )
    return {"limit_w": limit, "board_w": board}


def _host(host: Host) -> Iterator[tuple[str, Value]]:
    """The share of one device, written as a host with one device."""
    yield "devices", 1
    yield "memory_gib", gib_from_bytes(host.memory)
    yield "link_gb_per_s", gb_per_s_from_bytes_per_second(host.link)
    if host.bandwidth is not None:
        yield "memory_bandwidth_gb_per_s", gb_per_s_from_bytes_per_second(host.bandwidth)
    if host.disk is not None:
        yield (
            "disk",
            {
                "capacity_gib": gib_from_bytes(host.disk.capacity),
                "read_gb_per_s": gb_per_s_from_bytes_per_second(host.disk.read),
                "write_gb_per_s": gb_per_s_from_bytes_per_second(host.disk.write),
            },
        )


def _matmul(kernel: MatmulKernel | None) -> Table:
    if kernel is None:
        return {"form": "efficiency"}
    found: Table = {
        "form": "tiled",
        "compute": kernel.compute,
        "bandwidth": kernel.bandwidth,
        "launch_us": us_from_seconds(kernel.launch),
        "feed_gb_per_s": gb_per_s_from_bytes_per_second(kernel.feed),
        "fill": kernel.fill,
        "quantisation": kernel.quantisation,
        "split_us": us_from_seconds(kernel.split),
        "spread": kernel.spread,
    }
    if kernel.convert is not None:
        found["convert_gb_per_s"] = gb_per_s_from_bytes_per_second(kernel.convert)
    if kernel.clock != 1:
        found["clock"] = kernel.clock
    if kernel.added != 1:
        found["added"] = kernel.added
    return found


def _attention(kernel: AttentionKernel | None) -> Table:
    if kernel is None:
        return {"form": "efficiency"}
    found: Table = {
        "form": "tiled",
        "compute": kernel.compute,
        "softmax": kernel.softmax,
        "fill": kernel.fill,
        "tail": kernel.tail,
        "preparation_us": us_from_seconds(kernel.preparation),
        "passes": kernel.passes,
        "spread": kernel.spread,
    }
    if kernel.backward is not None:
        found["backward"] = kernel.backward
    return found


def _level(level: Level) -> Table:
    found: Table = {"name": level.name, "network": level.network}
    if level.fan_out is not None:
        found["fan_out"] = level.fan_out
    found["bandwidth_gb_per_s"] = gb_per_s_from_bytes_per_second(level.bandwidth)
    if level.protocols:
        found["protocol"] = [_protocol(protocol) for protocol in level.protocols]
    if level.in_network is not None:
        found["in_network"] = _protocol(level.in_network)
    if level.oversubscription != 1:
        found["oversubscription"] = level.oversubscription
    return found


def _protocol(protocol: Protocol) -> Table:
    return {
        "name": protocol.name,
        "setup_us": us_from_seconds(protocol.setup),
        "latency_us": us_from_seconds(protocol.latency),
        "efficiency": protocol.efficiency,
        "own": protocol.own,
        "serves": protocol.serves,
    }


def _sourced(path: str, table: Table, origins: Mapping[str, Origin]) -> dict[str, Any]:
    """A table in which every number, at any depth, is an inline table with its source and its kind."""
    return {key: _value(f"{path}.{key}", value, origins) for key, value in table.items()}


def _value(path: str, value: Value, origins: Mapping[str, Origin]) -> Any:
    match value:
        case str():
            return value
        case dict():
            return _sourced(path, value, origins)
        case list():
            return [_sourced(f"{path}.{index}", item, origins) for index, item in enumerate(value)]
    return _fact(path, value, origins)


def _fact(path: str, value: int | float, origins: Mapping[str, Origin]) -> "InlineTable":
    from tomlkit import inline_table

    known = [start for start in origins if path == start or path.startswith(start + ".")]
    if not known:
        raise InvalidProfileError(f"{path}: no source is known for {value}")
    origin = origins[max(known, key=len)]
    fact = inline_table()
    fact["value"] = value if isinstance(value, int) else float(f"{value:.6g}")
    fact["source"] = origin.source
    fact["kind"] = origin.kind
    return fact
