"""Files of measured times, and writing profiles."""

import errno
import json
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from hardware_profiles import (
    CollectiveRow,
    InvalidProfileError,
    KernelRow,
    MeasuredMachine,
    Measurements,
    MeasurementsError,
    Origin,
    dump_measurements,
    dump_profile,
    load_measurements,
    load_profile,
    parse_measurements,
    profile_names,
)
from hardware_profiles.corrections import Corrections, corrected_profile
from hardware_profiles.load import parse_profile
from tests.refusals import refused

MEASUREMENTS = Measurements(
    schema_version=1,
    date="2026-11-20",
    software="PyTorch 2.13",
    machine=MeasuredMachine(
        name="a machine", device_type="cpu", backend="gloo", processes=2, threads=1, compute_units=1, memory=1e9,
        reserved=1e8, slack=0.0,
    ),
    kernels=(
        KernelRow(
            op_class="matmul", call="linear", direction="forward", dtype="fp32", extents=(3, 4, 5), flops=120.0,
            bytes_moved=188.0, kernels=1, seconds=1.25e-6,
        ),
    ),
    collectives=(CollectiveRow(kind="all_reduce", devices=2, message=1024.0, seconds=3e-4),),
)  # fmt: skip
ORIGINS = {
    "device": Origin(source="a test", kind="measured"),
    "level": Origin(source="a test", kind="fitted"),
    "host": Origin(source="a test", kind="assumed"),
}


def test_measurements_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    path.write_text(dump_measurements(MEASUREMENTS), encoding="utf-8")
    assert load_measurements(path) == MEASUREMENTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version: 2 is not 1"),
        ({"kernels": [{"op_class": "matmul"}]}, "kernels.0.call: the key is missing"),
        ({"more": 1}, "more: "),
    ],
)
def test_a_file_that_does_not_read_is_refused_in_one_line(change: dict[str, object], message: str) -> None:
    content = {**json.loads(dump_measurements(MEASUREMENTS)), **change}
    with pytest.raises(MeasurementsError) as caught:
        parse_measurements(json.dumps(content), "times.json")
    assert str(caught.value).startswith(f"times.json: {message}")
    assert "\n" not in str(caught.value)


def test_text_and_no_file_are_refused(tmp_path: Path) -> None:
    with refused(MeasurementsError, "times.json", "line 1"):
        parse_measurements("not JSON", "times.json")
    with refused(MeasurementsError, os.strerror(errno.ENOENT)):
        load_measurements(tmp_path / "nothing.json")


def test_a_profile_is_written_as_it_is_read(tmp_path: Path) -> None:
    cpu = load_profile("cpu")
    path = tmp_path / "copy.toml"
    path.write_text(dump_profile(cpu, ORIGINS, "A copy."), encoding="utf-8")
    again = load_profile(path)
    assert again.device.peak_flops == cpu.device.peak_flops
    assert again.levels[0].protocols[0].latency == pytest.approx(cpu.levels[0].protocols[0].latency)
    assert dump_profile(again, ORIGINS, "A copy.") == path.read_text(encoding="utf-8")
    kinds = {fact.key.partition(".")[0]: fact.kind for fact in again.facts}
    assert kinds == {"device": "measured", "level": "fitted", "host": "assumed"}


def numbers_of(value: object, at: str = "") -> dict[str, object]:
    """The values of a cluster at any depth by their places, but not the sources."""
    if is_dataclass(value):
        inside = {one.name: getattr(value, one.name) for one in fields(value) if one.name != "facts" and one.init}
        found = [numbers_of(item, f"{at}.{name}") for name, item in inside.items()]
    elif isinstance(value, tuple):
        found = [numbers_of(item, f"{at}.{index}") for index, item in enumerate(value)]
    else:
        return {at: value}
    return {place: item for one in found for place, item in one.items()}


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", profile_names())
def test_every_number_of_a_profile_is_written(name: str) -> None:
    profile = load_profile(name)
    text = dump_profile(profile, ORIGINS, name)
    written, wanted = numbers_of(parse_profile(text.encode(), name)), numbers_of(profile)
    assert written.keys() == wanted.keys()
    for place, value in wanted.items():
        assert written[place] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), place
    corrected = corrected_profile(name, Corrections(factors={}, source="nothing"), name, "")
    assert numbers_of(parse_profile(corrected.encode(), name)) == numbers_of(profile)


def test_a_power_limit_without_watts_is_refused() -> None:
    limited = load_profile("h100-94gb")
    with refused(InvalidProfileError, "h100-94gb", "device.power", "watts"):
        dump_profile(replace(limited, facts=()), ORIGINS, "")


def test_a_number_without_a_source_is_refused() -> None:
    with refused(InvalidProfileError, "level.0.bandwidth_gb_per_s"):
        dump_profile(load_profile("cpu"), {"device": ORIGINS["device"]}, "")
