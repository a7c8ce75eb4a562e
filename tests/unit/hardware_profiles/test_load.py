import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import (
    GIB,
    OP_CLASSES,
    HardwareProfileError,
    InvalidProfileError,
    TopologyError,
    UnknownProfileError,
    load_profile,
    profile_names,
)
from tests.refusals import refused


def packaged_text(name: str) -> str:
    return resources.files("hardware_profiles").joinpath(f"{name}.toml").read_text()


def test_names() -> None:
    machines = (
        "a100-80gb ascend-910a-32gb ascend-910b-64gb ascend-910c-64gb cpu gb200-186gb gh200-96gb h100-80gb v100-32gb"
    )
    assert set(profile_names()) >= {*machines.split(), "h100-94gb", "h100-96gb"}
    assert list(profile_names()) == sorted(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_complete(name: str) -> None:
    cluster = load_profile(name)
    assert cluster.name == name
    assert [op_class for op_class, _ in cluster.device.efficiencies] == list(OP_CLASSES)
    assert {"bf16", "fp16", "fp32"} <= {dtype for dtype, _ in cluster.device.peak_flops}
    assert all(fact.source for fact in cluster.facts)
    assert cluster.levels[-1].fan_out is None
    for dtype, _ in cluster.device.peak_flops:
        for kernel in (cluster.device.matmul_kernel(dtype), cluster.device.attention_kernel(dtype)):
            assert kernel is None or 0 < kernel.compute <= 1


@pytest.mark.parametrize(
    ("name", "bf16", "fp32", "memory_bandwidth", "node", "port"),
    [
        ("a100-80gb", 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        ("h100-80gb", 989.4e12, 67e12, 3.35e12, 450e9, 50e9),
        ("h800-80gb", 989.4e12, 67e12, 3.35e12, 200e9, 50e9),
        ("h20-96gb", 148e12, 44e12, 4e12, 450e9, 50e9),
        ("l40s-48gb", 362.05e12, 91.6e12, 864e9, 31.5e9, 6.25e9),
        ("mi300x-192gb", 1307.4e12, 163.4e12, 5.3e12, 448e9, 50e9),
        ("mi325x-256gb", 1307.4e12, 163.4e12, 6e12, 448e9, 50e9),
        ("mi355x-288gb", 2516.6e12, 157.3e12, 8e12, 535.5e9, 50e9),
        ("a100-pcie-80gb", 312e12, 19.5e12, 1.935e12, 31.5e9, 12.5e9),
        ("h100-pcie-80gb", 756e12, 51e12, 2e12, 63e9, 25e9),
        ("rtx-a6000-48gb", 154.8e12, 38.7e12, 768e9, 31.5e9, 12.5e9),
        ("rtx-3090-24gb", 71e12, 35.6e12, 936e9, 31.5e9, 12.5e9),
        ("l4-24gb", 121e12, 30.3e12, 300e9, 31.5e9, 1.56e9),
        ("b200-180gb", 2250e12, 75e12, 8e12, 900e9, 50e9),
        ("ascend-910b-64gb", 353.9e12, 88.5e12, 1.6e12, 196e9, 25e9),
        ("h100-96gb", 989.4e12, 67e12, 2.4e12, 450e9, 50e9),
        ("v100-32gb", 15.7e12, 15.7e12, 0.9e12, 150e9, 6.25e9),
    ],
)
def test_figures_are_in_si_units(
    name: str, bf16: float, fp32: float, memory_bandwidth: float, node: float, port: float
) -> None:
    cluster = load_profile(name)
    device = cluster.device
    assert (device.peak("bf16"), device.peak("fp32")) == pytest.approx((bf16, fp32))
    assert device.memory_bandwidth == pytest.approx(memory_bandwidth)
    assert [level.bandwidth for level in cluster.levels] == pytest.approx([node, port])
    assert cluster.devices == 8


def test_a_profile_says_what_collectives_occupy_that_overlap(tmp_path: Path) -> None:
    text = packaged_text("h100-80gb")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("communication_units = { value = 20", "communication_units = { value = 33"))
    assert load_profile(path).device.overlapped == pytest.approx(0.75)
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith("communication_units")))
    assert load_profile(path).device.overlapped == 1.0
    path.write_text(text.replace("communication_units = { value = 20", "communication_units = { value = 132"))
    with refused(InvalidProfileError, "communication_units leave no compute unit"):
        load_profile(path)


@pytest.mark.parametrize("name", profile_names())
def test_collectives_of_gpus_occupy_a_tenth_to_a_fifth_of_the_device(name: str) -> None:
    """NCCL's kernels run on what computes, and nearly all of gloo; HCCL's default engine does not. They are as many on
    an H20, which has few units for its NVLink."""
    device = load_profile(name).device
    least, most = {"cuda": (0.1, 0.2), "cpu": (0.7, 0.9), "npu": (0.0, 0.0)}[device.device_type]
    most = 0.26 if name.startswith("h20-") else most
    assert least <= 1 - device.overlapped <= most


@pytest.mark.parametrize(
    ("name", "board", "share"),
    [
        ("a100-pcie-80gb", "a100-80gb", 0.75),
        ("rtx-6000-ada-48gb", "l40s-48gb", 300 / 350),
        ("l4-24gb", "l40s-48gb", 72 / 143),
    ],
)
def test_a_card_of_less_power_multiplies_as_the_same_chip_at_a_lower_clock(name: str, board: str, share: float) -> None:
    card, whole = load_profile(name).device, load_profile(board).device
    assert (whole.power_share, card.power_share) == (1.0, pytest.approx(share))
    assert card.matmul_kernel("bf16") == whole.matmul_kernel("bf16") is not None


def test_memory_is_in_gib() -> None:
    device = load_profile("a100-80gb").device
    assert (device.installed, device.memory) == (80 * GIB, 79.1 * GIB)
    assert (load_profile("cpu").device.installed, load_profile("cpu").device.memory) == (None, 4 * GIB)


def test_a_supernode_is_a_level_between_nodes_and_cluster() -> None:
    cluster = load_profile("ascend-910c-64gb")
    assert [(level.name, level.fan_out) for level in cluster.levels] == [
        ("node", 16),
        ("supernode", 48),
        ("cluster", None),
    ]
    spans = cluster.with_devices(1536).group(1536, 1).spans
    assert [(span.level.name, span.count) for span in spans] == [("node", 16), ("supernode", 48), ("cluster", 2)]


def test_neighbours_in_a_cube_mesh_have_their_part_of_the_links() -> None:
    """vTrain measured 22.6 and 134.5 GB/s of bus bandwidth on two and on eight V100."""
    cluster = load_profile("v100-32gb")
    best = [cluster.group(count, 1).spans[0].bandwidth * cluster.levels[0].efficiency for count in (2, 8)]
    assert best == pytest.approx([22.6e9, 134.5e9], rel=0.15)


def test_a_dtype_may_be_like_another() -> None:
    device = load_profile("h100-80gb").device
    assert device.matmul_kernel("fp16") == device.matmul_kernel("bf16") is not None
    assert device.attention_kernel("fp16") == device.attention_kernel("bf16") is not None
    assert device.matmul_kernel("fp32") is None


def test_every_number_keeps_its_source() -> None:
    facts = {fact.key: fact for fact in load_profile("a100-80gb").facts}
    fact = facts["device.peak_tflops.bf16"]
    assert (fact.value, fact.kind) == (312, "datasheet")
    assert "A100" in fact.source
    assert facts["level.1.bandwidth_gb_per_s"].value == 25


def test_unknown_name_suggests_the_nearest() -> None:
    with refused(UnknownProfileError, "h100", "h100-80gb", "h100-94gb", "h100-96gb"):
        load_profile("h100")
    with refused(UnknownProfileError, "zzz", "a100-40gb", "a100-80gb"):
        load_profile("zzz")


def test_missing_file(tmp_path: Path) -> None:
    (other := tmp_path / "tiny.run.json").write_text("{}")
    with refused(UnknownProfileError, other, ".toml"):
        load_profile(other)
    with refused(UnknownProfileError, "nowhere/mine.toml"):
        load_profile("nowhere/mine.toml")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(packaged_text("cpu").replace('id = "cpu"', 'id = "mine"'))
    assert load_profile(path).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("schema_version = 1", "schema_version = 2", ("schema_version", 1)),
        ("[device]", "[device]\ncolour = 3", ("device.colour",)),
        ("fp32 = { value = 0.0685", "fp32 = { value = -1", ("device.peak_tflops.fp32.value", "1e-09")),
        ("fp32 = { value = 0.0685", "fp32 = { value = 1e-320", ("device.peak_tflops.fp32.value", "1e-09")),
        (
            "memory_bandwidth_gb_per_s = { value = 31.8",
            "memory_bandwidth_gb_per_s = { value = 1e300",
            ("device.memory_bandwidth_gb_per_s.value", 1000000000000),
        ),
        ('network = "switch"', 'network = "star"', ("level.0.network", "switch", "mesh")),
        ('network = "switch"', 'network = "mesh"', ("level", "host", "cpu", "mesh", "fan_out")),
        ("[device.efficiency.copy]", "[device.efficiency.paste]", ("['copy']", "['paste']")),
        ("memory_gib = { value = 4", "memory_gib = { value = 0.4", ("device", "reserved_gib")),
        (
            "[device.matmul]\n",
            "[device.matmul]\nfp8 = { form = 'efficiency' }\n",
            ("matmul", "peak_tflops"),
        ),
        (
            'fp16 = { form = "efficiency" }',
            'fp16 = { form = "like", dtype = "bf16" }',
            ("matmul.fp16", "bf16"),
        ),
        ('fp16 = { form = "efficiency" }', 'fp16 = { form = "guess" }', ("device.matmul.fp16", "guess", "efficiency")),
        (
            'fp16 = { form = "efficiency" }',
            'fp16 = { form = "tiled" }',
            ("device.matmul.fp16.tiled.compute",),
        ),
        ("schema_version = 1", "schema_version = ", ("TOML", "line 4")),
        ('kind = "measured"', 'kind = "guessed"', ("device.memory_bandwidth_gb_per_s.kind", "measured", "assumed", 13)),
    ],
)
def test_a_bad_file_is_named_with_key_and_reason(tmp_path: Path, old: str, new: str, facts: tuple[object, ...]) -> None:
    path = tmp_path / "bad.toml"
    text = packaged_text("cpu")
    assert old in text
    path.write_text(text.replace(old, new))
    with refused(InvalidProfileError, path, *facts) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_a_machine_made_in_python_has_numbers() -> None:
    machine = load_profile("cpu")
    changed: tuple[dict[str, Any], ...] = ({"memory_bandwidth": math.nan}, {"peak_flops": (("fp32", math.nan),)})
    for changes in changed:
        with refused(HardwareProfileError, "CPU process", "nan"):
            replace(machine.device, **changes)
    with refused(TopologyError, "bandwidth", "nan"):
        replace(machine, levels=tuple(replace(level, bandwidth=math.nan) for level in machine.levels))
