"""The form of a profile file: exact keys, human units in the key names, and a source and a kind with every number.

    memory_gib = { value = 80, source = "NVIDIA A100 datasheet, June 2021", kind = "datasheet" }

`to_cluster` converts to SI units; no other code knows the units of the file.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hardware_profiles.cluster import Cluster
from hardware_profiles.device import OP_CLASSES, Device, DeviceType, Efficiency
from hardware_profiles.fact_models import AtLeastOne, Number, Portion, Positive, Share, Strict, Text, facts_of
from hardware_profiles.host import Host, Store
from hardware_profiles.kernels import AttentionKernel, MatmulKernel
from hardware_profiles.network import Level, NetworkKind, Protocol, Serves
from hardware_profiles.units import (
    bytes_from_gib,
    bytes_per_second_from_gb_per_s,
    flops_per_second_from_tflops,
    seconds_from_us,
)


class _FanOut(Number):
    value: int = Field(ge=2)


class _Efficiency(Strict):
    compute: Share
    bandwidth: Share


class _Units(Number):
    value: int = Field(ge=1)


class _ByEfficiency(Strict):
    """No fitted kernel: use the roofline with the efficiency of the op class."""

    form: Literal["efficiency"]


class _Like(Strict):
    """Use the fitted kernel of another dtype of this profile."""

    form: Literal["like"]
    dtype: Text


class _Matmul(Strict):
    form: Literal["tiled"]
    compute: Share
    bandwidth: Share
    launch_us: Number
    feed_gb_per_s: Positive
    fill: Number
    quantisation: Portion
    split_us: Number
    convert_gb_per_s: Positive | None = None
    spread: Number
    clock: Share | None = None
    added: Share | None = None

    def convert(self) -> MatmulKernel:
        rate = self.convert_gb_per_s
        return MatmulKernel(
            compute=self.compute.value,
            bandwidth=self.bandwidth.value,
            launch=seconds_from_us(self.launch_us.value),
            feed=bytes_per_second_from_gb_per_s(self.feed_gb_per_s.value),
            fill=self.fill.value,
            quantisation=self.quantisation.value,
            split=seconds_from_us(self.split_us.value),
            convert=None if rate is None else bytes_per_second_from_gb_per_s(rate.value),
            spread=self.spread.value,
            clock=1.0 if self.clock is None else self.clock.value,
            added=1.0 if self.added is None else self.added.value,
        )


class _Attention(Strict):
    form: Literal["tiled"]
    compute: Share
    softmax: Number
    fill: Number
    tail: Number
    preparation_us: Number
    passes: Number
    spread: Number
    backward: Positive | None = None

    def convert(self) -> AttentionKernel:
        return AttentionKernel(
            compute=self.compute.value,
            softmax=self.softmax.value,
            fill=self.fill.value,
            tail=self.tail.value,
            preparation=seconds_from_us(self.preparation_us.value),
            passes=self.passes.value,
            spread=self.spread.value,
            backward=None if self.backward is None else self.backward.value,
        )


_MatmulForm = Annotated[_Matmul | _Like | _ByEfficiency, Field(discriminator="form")]
_AttentionForm = Annotated[_Attention | _Like | _ByEfficiency, Field(discriminator="form")]


class _Protocol(Strict):
    name: Text
    setup_us: Number
    latency_us: Number
    efficiency: Share
    own: Number | None = None
    serves: Serves = "all"

    def convert(self) -> Protocol:
        return Protocol(
            name=self.name,
            setup=seconds_from_us(self.setup_us.value),
            latency=seconds_from_us(self.latency_us.value),
            efficiency=self.efficiency.value,
            own=0.0 if self.own is None else self.own.value,
            serves=self.serves,
        )


class _Level(Strict):
    name: Text
    network: NetworkKind
    fan_out: _FanOut | None = None
    bandwidth_gb_per_s: Positive
    protocol: list[_Protocol] = Field(min_length=1)
    in_network: _Protocol | None = None
    oversubscription: AtLeastOne | None = None

    def convert(self) -> Level:
        return Level(
            name=self.name,
            fan_out=None if self.fan_out is None else self.fan_out.value,
            network=self.network,
            bandwidth=bytes_per_second_from_gb_per_s(self.bandwidth_gb_per_s.value),
            protocols=tuple(protocol.convert() for protocol in self.protocol),
            in_network=None if self.in_network is None else self.in_network.convert(),
            oversubscription=1.0 if self.oversubscription is None else self.oversubscription.value,
        )


class _Power(Strict):
    """The power limit that is set, and that of the board whose kernels the profile has, in W."""

    limit_w: Positive
    board_w: Positive

    @property
    def share(self) -> float:
        return self.limit_w.value / self.board_w.value


_Generation = Literal[
    "flash1", "flash1_64", "flash2", "flash2_64", "sdpa", "sdpa_64", "cudnn", "cudnn_64"
]  # fmt: skip


class _Dropout(Strict):
    """How many times longer the best attention kernels take if they drop probabilities."""

    forward: AtLeastOne
    backward: AtLeastOne


class _Device(Strict):
    name: Text
    device_type: DeviceType
    memory_gib: Positive
    reserved_gib: Number
    allocator_slack: Number
    memory_bandwidth_gb_per_s: Positive
    launch_latency_us: Number
    compute_units: _Units
    peak_tflops: dict[Text, Positive] = Field(min_length=1)
    efficiency: dict[Text, _Efficiency]
    matmul: dict[Text, _MatmulForm]
    attention: dict[Text, _AttentionForm]
    host_latency_us: Number | None = None
    misaligned: AtLeastOne | None = None
    power: _Power | None = None
    generations: dict[_Generation, Positive] = Field(default_factory=dict)
    dropout: _Dropout | None = None
    usable_gib: Positive | None = None
    communication_units: Number | None = None

    @model_validator(mode="after")
    def _has_every_op_class(self) -> "_Device":
        given = set(self.efficiency)
        missing, unknown = sorted(set(OP_CLASSES) - given), sorted(given - set(OP_CLASSES))
        if missing or unknown:
            raise ValueError(f"efficiency lacks op classes {missing} and has unknown ones {unknown}")
        if self.usable_gib is not None and self.usable_gib.value > self.memory_gib.value:
            raise ValueError("usable_gib is more than memory_gib")
        if self.communication_units is not None and self.communication_units.value >= self.compute_units.value:
            raise ValueError("communication_units leave no compute unit")
        if self.reserved_gib.value >= (self.usable_gib or self.memory_gib).value:
            raise ValueError("reserved_gib leaves no memory")
        return self

    @model_validator(mode="after")
    def _says_how_it_computes(self) -> "_Device":
        dtypes = set(self.peak_tflops)
        for name, forms in (("matmul", self.matmul), ("attention", self.attention)):
            if set(forms) != dtypes:
                raise ValueError(f"{name} must name the dtypes of peak_tflops {sorted(dtypes)}, not {sorted(forms)}")
            for dtype, form in forms.items():
                if isinstance(form, _Like) and not isinstance(forms.get(form.dtype), _Matmul | _Attention):
                    raise ValueError(f"{name}.{dtype} is to be like {form.dtype}, which has no figures")
        return self

    def convert(self) -> Device:
        return Device(
            name=self.name,
            device_type=self.device_type,
            memory=bytes_from_gib((self.usable_gib or self.memory_gib).value),
            installed=None if self.usable_gib is None else bytes_from_gib(self.memory_gib.value),
            reserved=bytes_from_gib(self.reserved_gib.value),
            allocator_slack=self.allocator_slack.value,
            memory_bandwidth=bytes_per_second_from_gb_per_s(self.memory_bandwidth_gb_per_s.value),
            launch_latency=seconds_from_us(self.launch_latency_us.value),
            peak_flops=tuple(
                (dtype, flops_per_second_from_tflops(fact.value)) for dtype, fact in sorted(self.peak_tflops.items())
            ),
            efficiencies=tuple(
                (name, Efficiency(compute=item.compute.value, bandwidth=item.bandwidth.value))
                for name, item in sorted(self.efficiency.items())
            ),
            compute_units=self.compute_units.value,
            matmul_kernels=tuple((dtype, _matmul(self.matmul, dtype)) for dtype in sorted(self.matmul)),
            attention_kernels=tuple((dtype, _attention(self.attention, dtype)) for dtype in sorted(self.attention)),
            host_latency=0.0 if self.host_latency_us is None else seconds_from_us(self.host_latency_us.value),
            misaligned=1.0 if self.misaligned is None else self.misaligned.value,
            power_share=1.0 if self.power is None else self.power.share,
            communication_units=0.0 if self.communication_units is None else self.communication_units.value,
            generations=tuple((name, fact.value) for name, fact in sorted(self.generations.items())),
            dropout=None if self.dropout is None else (self.dropout.forward.value, self.dropout.backward.value),
        )


def _matmul(forms: dict[str, _MatmulForm], dtype: str) -> MatmulKernel | None:
    form = forms[dtype]
    form = forms[form.dtype] if isinstance(form, _Like) else form
    return form.convert() if isinstance(form, _Matmul) else None


def _attention(forms: dict[str, _AttentionForm], dtype: str) -> AttentionKernel | None:
    form = forms[dtype]
    form = forms[form.dtype] if isinstance(form, _Like) else form
    return form.convert() if isinstance(form, _Attention) else None


class _Disk(Strict):
    """The disks of one host, together."""

    capacity_gib: Positive
    read_gb_per_s: Positive
    write_gb_per_s: Positive


class _Host(Strict):
    """One host. Its `devices` share `memory_gib`, the memory bandwidth and the disks; the devices behind one uplink
    share `link_gb_per_s`, which is one direction of an uplink."""

    devices: _Units
    memory_gib: Positive
    link_gb_per_s: Positive
    devices_per_uplink: _Units | None = None
    memory_bandwidth_gb_per_s: Positive | None = None
    disk: _Disk | None = None

    def convert(self) -> Host:
        count, disk = self.devices.value, self.disk
        behind = 1 if self.devices_per_uplink is None else self.devices_per_uplink.value
        return Host(
            memory=bytes_from_gib(self.memory_gib.value) / count,
            link=bytes_per_second_from_gb_per_s(self.link_gb_per_s.value) / behind,
            bandwidth=None
            if self.memory_bandwidth_gb_per_s is None
            else bytes_per_second_from_gb_per_s(self.memory_bandwidth_gb_per_s.value) / count,
            disk=None
            if disk is None
            else Store(
                capacity=bytes_from_gib(disk.capacity_gib.value) / count,
                read=bytes_per_second_from_gb_per_s(disk.read_gb_per_s.value) / count,
                write=bytes_per_second_from_gb_per_s(disk.write_gb_per_s.value) / count,
            ),
        )


class ProfileFile(Strict):
    """A whole profile file."""

    schema_version: Literal[1]
    id: Text
    device: _Device
    level: list[_Level] = Field(min_length=1)
    host: _Host | None = None

    def to_cluster(self) -> Cluster:
        """The cluster in SI units, with one unit of the innermost level in use; a single device if that level is
        unbounded."""
        levels = tuple(level.convert() for level in self.level)
        return Cluster(
            name=self.id,
            device=self.device.convert(),
            levels=levels,
            devices=levels[0].fan_out or 1,
            host=None if self.host is None else self.host.convert(),
            facts=tuple(facts_of("", self)),
        )
