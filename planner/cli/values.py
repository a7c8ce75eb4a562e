"""Parses values of options: meshes, sizes of memory, virtual stages, strategies of operators."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hardware_profiles.units import GIB, KIB, MIB
from planner.cli.texts import say
from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.sharding.update import Buckets
    from planner.strategy_search.request.request import Padding, Placing, Shard

_BYTES = {"": GIB, "gib": GIB, "mib": MIB, "kib": KIB, "tib": 1024 * GIB, "gb": 10**9, "mb": 10**6, "tb": 10**12}


def parse_mesh(text: str) -> tuple[int, ...]:
    """The sizes of the mesh axes, without axes of one device."""
    words = text.lower().split("x")
    if not all(re.fullmatch("0*[1-9][0-9]{0,9}", word) for word in words):
        raise RequestError(
            f"--mesh '{text}' is not a mesh; write the sizes of its axes, slowest links first, as in 8x4"
        )
    sizes = tuple(int(word) for word in words if int(word) > 1)
    if len(sizes) > 4:
        raise RequestError(f"--mesh {text} has {len(sizes)} axes; a mesh has at most four, as in 2x8x4")
    return sizes


def parse_memory(text: str, option: str = "--memory-limit") -> float:
    """Bytes from 64GiB, 64 (GiB too, with a note), 512MiB or 64GB."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if found is None or found[2] not in _BYTES:
        raise RequestError(f"{option} '{text}' is not a size; write it as in 64GiB, 512MiB or 64GB")
    size = float(found[1]) * _BYTES[found[2]]
    if not 0 < size < math.inf:
        raise RequestError(f"{option} '{text}' leaves no memory; write a size above 0, as in 64GiB")
    if not found[2]:
        say(f"note: {option} {text} is {found[1]} GiB", err=True)
    return size


def memory_limit(text: str, machine: "Machine") -> float:
    """Bytes of --memory-limit. A note says so if it is above the memory of every device and limits nothing.

    Raises RequestError where such a number has no unit and is 1,024 or more, which people write in MiB.
    """
    from hardware_profiles import MixedCluster

    groups = machine.groups if isinstance(machine, MixedCluster) else (machine,)
    limit, most = parse_memory(text), max(group.device.installed or group.device.memory for group in groups)
    if limit > most:
        have = f"devices of {machine.name} have {most / GIB:.4g} GiB at most"
        if text.strip()[-1].isdigit() and limit >= 1024 * GIB:
            raise RequestError(f"--memory-limit {text}: {have}; write the unit that is meant, as in {text.strip()}MiB")
        say(f"note: --memory-limit {text} limits nothing: {have}", err=True)
    return limit


def parse_margin(text: str) -> float:
    """The margin for the error of a predicted peak: a share of the peak, 100% at most."""
    return parse_share("memory-margin", text)


def parse_percent(option: str, text: str, most: float) -> float:
    """A share from 2% or 2, with a maximum in percent."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*", text, re.ASCII)
    if found is None or float(found[1]) > most:
        raise RequestError(f"--{option} '{text}' is not legal; write percent, as in 1 or 0.5%, from 0 to {most:g}")
    return float(found[1]) / 100


def parse_share(option: str, text: str) -> float:
    """A share from 5% or 0.05."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text, re.ASCII)
    share = math.nan if found is None else float(found[1]) / (100 if found[2] else 1)
    if not 0 <= share <= 1:
        raise RequestError(f"--{option} '{text}' is not a share; write it as in 5%, from 0% to 100%")
    return share


def parse_count(option: str, text: str) -> int:
    """A number of 1 or more; 0 for `auto`: the search decides."""
    if text.lower() == "auto":
        return 0
    if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
        raise RequestError(f"--{option} '{text}' is not legal; give a whole number from 1, or auto")
    return int(text)


def parse_chunks(text: str | None, *, none: bool) -> int | None:
    """Chunks of tensor parallelism: a number, 0 for `auto`, 1 for `off`; always 1 with --no-overlap."""
    from planner.plan.plan import MOST_CHUNKS

    if none and text not in (None, "off", "1"):
        raise RequestError(f"--no-overlap has no chunks; leave out --no-overlap, or --tensor-overlap {text}")
    if none or (text is not None and text.lower() == "off"):
        return 1
    found = None if text is None else parse_count("tensor-overlap", text)
    if found is not None and found > MOST_CHUNKS:
        raise RequestError(f"--tensor-overlap {text}: at most {MOST_CHUNKS} chunks")
    return found


def parse_expert_overlap(text: str | None, *, none: bool) -> bool | None:
    """Whether the all-to-all of experts is overlapped: `on`, `off`, or None for `auto`; never with --no-overlap."""
    word = "auto" if text is None else text.strip().lower()
    known = {"auto": None, "on": True, "off": False}
    if word not in known:
        raise RequestError(f"--expert-overlap {text}: give auto, on or off")
    if none and word == "on":
        raise RequestError("--no-overlap waits for experts, too; leave out --no-overlap, or --expert-overlap on")
    return False if none else known[word]


def parse_buckets(text: str) -> "Buckets":
    """none, auto, a size, positions of parameters, or patterns with numbers."""
    word = text.strip().lower()
    if word == "none":
        return "none"
    if word == "auto":
        return "auto"
    parts = [part.strip() for part in text.split(",")]
    numbered = [re.fullmatch(r"(.+)=([0-9]{1,9})", part) for part in parts]
    if all(numbered):
        return tuple((found[1].strip(), int(found[2])) for found in numbered if found is not None)
    if all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        return tuple(int(part) for part in parts)
    sized = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmg]i?b)", word, re.ASCII)
    if sized is None or sized[2] not in _BYTES:
        raise RequestError(
            f"--buckets '{text}': write none, auto, a size as in 25MiB, positions as in 20,35, or patterns with numbers"
            " as in '*attn*=0,*mlp*=1'"
        )
    return int(float(sized[1]) * _BYTES[sized[2]])


_PLACING: Mapping[str, "Placing"] = {"auto": "auto", "none": "given"}


def placing_of(texts: Sequence[str]) -> "Placing":
    """How the search places tables: "auto", "given" (only those given by hand), or "fit" (nothing given: on the host if
    nothing fits otherwise)."""
    words = [text for text in texts if text in _PLACING]
    if len(set(words)) > 1 or ("none" in words and len(texts) > len(words)):
        raise RequestError(f"--place {' '.join(texts)}: none leaves all tables on the devices; give it alone")
    return _PLACING[words[0]] if words else "given" if texts else "fit"


_AUTO, _BATCH = "auto", "batch"


def padding_of(texts: Sequence[str]) -> "Padding":
    """How the search pads weights: "auto", or only those "given"."""
    return "auto" if _AUTO in texts else "given"


def batch_multiple_of(texts: Sequence[str]) -> int | None:
    """The multiple to which batch=N pads the global batch; None if not given."""
    found = [number for pattern, number in _pads(texts) if pattern == _BATCH]
    if len(found) > 1:
        raise RequestError(f"--pad {' --pad '.join(f'{_BATCH}={n}' for n in found)}: give one of them")
    if found and found[0] < 1:
        raise RequestError(f"--pad {_BATCH}={found[0]}: a global batch is no multiple of it; give 1 or more")
    return found[0] if found else None


def parse_pads(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Weights and the multiple to which their rows are padded, each PATTERN=N; without the word of `padding_of` and
    without the global batch."""
    return tuple(pad for pad in _pads(texts) if pad[0] != _BATCH)


def _pads(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    found = []
    for text in texts:
        if text == _AUTO:
            continue
        pattern, equals, number = text.rpartition("=")
        if not equals or not pattern.strip() or not re.fullmatch("[0-9]{1,9}", number.strip()):
            raise RequestError(f"--pad '{text}': write PATTERN=N, as in 'lm_head.weight=4', or auto")
        found.append((pattern.strip(), int(number)))
    return tuple(found)


def parse_places(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Tables and their places, each PATTERN=PLACE; without the words of `placing_of`."""
    found = []
    for text in texts:
        if text in _PLACING:
            continue
        pattern, equals, place = text.rpartition("=")
        if not equals or not pattern.strip() or not place.strip():
            raise RequestError(
                f"--place '{text}': write PATTERN=host or PATTERN=servers, as in 'tables.*=host', or auto, or none"
            )
        found.append((pattern.strip(), place.strip()))
    return tuple(found)


def parse_shards(texts: Sequence[str]) -> tuple["Shard", ...]:
    """The strategies given by hand; a pattern may contain '='."""
    from planner.strategy_search.request.shard import shard

    found = []
    for text in texts:
        pattern, equals, strategy = text.rpartition("=")
        if not equals or not pattern.strip():
            raise RequestError(
                f"--shard '{text}': write PATTERN=STRATEGY, an operator and the factor for each mesh axis, as in"
                " '*q_proj*=b,o'"
            )
        found.append(shard(pattern.strip(), strategy))
    return tuple(found)
