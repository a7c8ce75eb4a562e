"""Laws of kernel times that the search relies on, for every profile and dtype.

monotone       more rows, columns, depth or batch never take less
subadditive    c-fold of any of them takes at most c times as long: k parts of a micro-batch, together, take no less
               than the whole
bounded        nothing beats flops / best_rate
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import AttentionShape, attention_backward_time, attention_time, best_rate, matmul_time
from hardware_profiles import Device, load_profile, profile_names

ULPS = 1e-12
PAIRS = [
    (name, dtype)
    for name in profile_names()
    for dtype, _ in load_profile(name).device.matmul_kernels
    if dtype != "tf32"
]
ANY = st.sampled_from(PAIRS)
EXTENTS = st.integers(1, 20000) | st.sampled_from([64, 128, 4096, 5120, 8192, 28672, 65536])
SHAPES = st.tuples(EXTENTS, EXTENTS, EXTENTS, st.integers(1, 256))
FACTORS = st.integers(1, 64)


def device_of(name: str) -> Device:
    return load_profile(name).device


@given(ANY, SHAPES, st.integers(0, 3), FACTORS, EXTENTS)
def test_products(pair: tuple[str, str], shape: tuple[int, ...], which: int, factor: int, more: int) -> None:
    name, dtype = pair
    device = device_of(name)
    base = matmul_time(*shape, dtype, device)
    assert base >= 2.0 * np.prod(np.array(shape, dtype=float)) / best_rate("matmul", dtype, device) * (1 - ULPS)
    times = [shape[at] * (factor if at == which else 1) for at in range(4)]
    assert matmul_time(*times, dtype, device) <= factor * base * (1 + ULPS)
    larger = [shape[at] + (more if at == which else 0) for at in range(4)]
    assert matmul_time(*larger, dtype, device) >= base * (1 - ULPS)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionShape:
    groups, queries = draw(st.integers(1, 16)), draw(st.integers(1, 20000))
    return AttentionShape(
        batch=draw(st.integers(1, 64)),
        heads=groups * draw(st.integers(1, 16)),
        key_heads=groups,
        queries=queries,
        keys=draw(st.just(queries) | st.integers(1, 20000)),
        head_dim=draw(st.sampled_from([64, 80, 128, 256])),
        value_dim=draw(st.sampled_from([64, 128])),
        causal=draw(st.booleans()),
    )


@given(ANY, attentions(), FACTORS, st.sampled_from(["batch", "heads", "queries", "keys", "head_dim"]))
def test_attention(pair: tuple[str, str], shape: AttentionShape, factor: int, which: str) -> None:
    name, dtype = pair
    device = device_of(name)
    for time, work in ((attention_time, 1.0), (attention_backward_time, 2.5)):
        base = time(shape, dtype, device)
        assert base >= work * shape.flops / best_rate("attention", dtype, device) * (1 - ULPS)
        larger = time(replace(shape, **{which: getattr(shape, which) * factor}), dtype, device)
        assert larger >= base * (1 - ULPS)
        if which in ("batch", "heads"):
            assert larger <= factor * base * (1 + ULPS)


@given(ANY, st.lists(SHAPES, min_size=1, max_size=6))
def test_arrays_equal_numbers(pair: tuple[str, str], shapes: list[tuple[int, ...]]) -> None:
    name, dtype = pair
    columns = [np.array(column, dtype=float) for column in zip(*shapes, strict=True)]
    times = matmul_time(*columns, dtype, device_of(name))
    assert list(times) == pytest.approx([matmul_time(*shape, dtype, device_of(name)) for shape in shapes], rel=1e-12)
