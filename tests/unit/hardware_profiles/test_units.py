import pytest

from hardware_profiles import units


def test_gb_is_decimal_and_gib_is_binary() -> None:
    assert units.bytes_from_gib(1) == 2**30
    assert units.bytes_per_second_from_gb_per_s(1) == 1e9
    assert units.flops_per_second_from_tflops(312) == 312e12
    assert units.seconds_from_us(5) == pytest.approx(5e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.5])
def test_inverses(value: float) -> None:
    assert units.gib_from_bytes(units.bytes_from_gib(value)) == value
    assert units.gb_per_s_from_bytes_per_second(units.bytes_per_second_from_gb_per_s(value)) == value
    assert units.us_from_seconds(units.seconds_from_us(value)) == pytest.approx(value)
