"""Training stacks by name, read from `stacks/*.toml`, where every number has its source.

passes = { value = 1.8, source = "...", kind = "fitted" }
"""

from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Literal, Self

from pydantic import NonNegativeInt, ValidationError, model_validator

from hardware_profiles.cluster import Fact
from hardware_profiles.errors import InvalidProfileError, UnknownProfileError, suggestion
from hardware_profiles.fact_models import Number, Portion, Positive, Strict, Text, facts_of
from hardware_profiles.foreign import ForeignTextError, decoded, form_fault, parse_toml
from hardware_profiles.memory_intervals import peak_spread
from hardware_profiles.memory_intervals import table as peak_spreads_known
from hardware_profiles.software import (
    PYTORCH,
    AttentionKernels,
    ComposedLoss,
    Dispatcher,
    Hidden,
    LossMemory,
    Software,
    Stored,
)
from hardware_profiles.units import MIB, seconds_from_us

_SUFFIX = ".toml"


class _Hidden(Strict):
    tensor: Portion
    gathers: Portion
    reductions: Portion
    exchange: Portion | None = None


class _Stored(Strict):
    weight: Number
    fp16: Number
    bf16: Number
    master: Number
    update: Number
    moment: Number | None = None


class _StackFile(Strict):
    """A whole stack file; `of` states the software and its date."""

    schema_version: Literal[1]
    id: Text
    of: Text
    attention: AttentionKernels
    whole_blocks: bool
    accumulates: bool
    passes: Positive
    host: Number
    scores: Number
    bucket_mib: Number | None = None
    bucket_parameters: Positive | None = None
    bucket_per_device: Number | None = None
    fused: bool
    fuses_chains: bool = False
    ahead: Number
    regathers: bool
    loss: LossMemory
    composed_loss: ComposedLoss = ""
    buffers_mib: Number
    grouped_us: Number | None = None
    adds: bool = False
    exchanges_at_once: bool = False
    exchanges_parts: bool = False
    owns_whole: bool = False
    copies_gradients: NonNegativeInt = 0
    sums_biases: bool = False
    casts: Portion | None = None
    dispatcher: Dispatcher = "alltoall"
    fused_experts: bool = False
    copies_out: bool = False
    rearranges: bool = False
    modules: bool = False
    gathers_narrow: bool = False
    remakes: tuple[Literal["experts"], ...] = ()
    scatter_gather: bool = False
    waits_to_send: bool = False
    sinks: Positive | None = None
    softmax_heads: Number | None = None
    updates_apart: bool = False
    communicators: Portion | None = None
    hidden: _Hidden
    stored: _Stored

    @model_validator(mode="after")
    def _counts_buckets_once(self) -> Self:
        if (self.bucket_mib is None) == (self.bucket_parameters is None):
            raise ValueError("a stack has either bucket_mib or bucket_parameters")
        if self.bucket_per_device is not None and self.bucket_parameters is None:
            raise ValueError("bucket_per_device is beside bucket_parameters")
        return self

    def to_software(self) -> Software:
        return Software(
            name=self.id,
            passes=self.passes.value,
            host=self.host.value,
            attention=self.attention,
            scores=self.scores.value,
            whole_blocks=self.whole_blocks,
            accumulates=self.accumulates,
            hidden=Hidden(**_values(self.hidden)),
            bucket=0.0 if self.bucket_mib is None else self.bucket_mib.value * MIB,
            bucket_parameters=0 if self.bucket_parameters is None else int(self.bucket_parameters.value),
            bucket_per_device=0 if self.bucket_per_device is None else int(self.bucket_per_device.value),
            fused=self.fused,
            fuses_chains=self.fuses_chains,
            ahead=int(self.ahead.value),
            regathers=self.regathers,
            loss=self.loss,
            composed_loss=self.composed_loss,
            buffers=self.buffers_mib.value * MIB,
            adds=self.adds,
            exchanges_at_once=self.exchanges_at_once,
            exchanges_parts=self.exchanges_parts,
            owns_whole=self.owns_whole,
            copies_gradients=self.copies_gradients,
            sums_biases=self.sums_biases,
            casts=1.0 if self.casts is None else self.casts.value,
            grouped=0.0 if self.grouped_us is None else seconds_from_us(self.grouped_us.value),
            dispatcher=self.dispatcher,
            fused_experts=self.fused_experts,
            copies_out=self.copies_out,
            rearranges=self.rearranges,
            modules=self.modules,
            gathers_narrow=self.gathers_narrow,
            remakes=self.remakes,
            scatter_gather=self.scatter_gather,
            waits_to_send=self.waits_to_send,
            sinks=1.0 if self.sinks is None else self.sinks.value,
            softmax_heads=1 if self.softmax_heads is None else int(self.softmax_heads.value),
            updates_apart=self.updates_apart,
            communicators=1.0 if self.communicators is None else self.communicators.value,
            stored=Stored(**_values(self.stored)),
        )


def _values(numbers: _Hidden | _Stored) -> dict[str, float]:
    """The numbers without their sources."""
    return {name: number.value for name, number in numbers if number is not None}


def software_names() -> tuple[str, ...]:
    """Names of the stacks, sorted."""
    files = resources.files("hardware_profiles").joinpath("stacks").iterdir()
    names = [file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)]
    return tuple(sorted((PYTORCH.name, *names)))


def load_software(name: str) -> Software:
    """A stack by its name, with the interval of its peaks.

    Raises `UnknownProfileError`, which names the nearest stacks.
    """
    software = PYTORCH if name == PYTORCH.name else _stack(name).to_software()
    spread = peak_spread(name)
    return replace(software, peak_low=spread.low, peak_high=spread.high)


def software_facts(name: str) -> tuple[Fact, ...]:
    """The numbers of a stack with their sources. Raises: as `load_software`."""
    known = () if name == PYTORCH.name else tuple(facts_of("", _stack(name)))
    return (*known, *_peak_facts(name))


def _peak_facts(name: str) -> tuple[Fact, Fact]:
    spread = peak_spread(name)
    whose = "with this stack" if name in peak_spreads_known() else "with any stack, as there are too few of this one"
    source = f"measured over predicted peaks of {spread.runs} published runs {whose}: nine of ten lie between the ends"
    return (
        Fact(key="peak_low", value=spread.low, source=source, kind="fitted"),
        Fact(key="peak_high", value=spread.high, source=source, kind="fitted"),
    )


@lru_cache(maxsize=64)
def _stack(name: str) -> _StackFile:
    if name not in software_names():
        meant = suggestion(name, software_names())
        raise UnknownProfileError(f"no training stack {name!r}; {meant} (plan stacks lists all)")
    file = resources.files("hardware_profiles").joinpath("stacks", name + _SUFFIX)
    return parse_stack(file.read_bytes(), f"stacks/{file.name}")


def parse_stack(content: bytes, where: str) -> _StackFile:
    """The stack that the content of a file describes. Raises `InvalidProfileError`, which names `where`."""
    try:
        return _StackFile.model_validate(parse_toml(decoded(content)))
    except ForeignTextError as error:
        raise InvalidProfileError(f"{where}: {error}") from error
    except ValidationError as error:
        raise InvalidProfileError(f"{where}: {form_fault(error)}") from error
