"""Scales of weights that are gathered in 8 bits: those of the whole weight, however its rows are divided."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from planner.fp8_recipes import BLOCK
from planner.models.experts.fp8 import largest, scale_of
from planner.sharding.layout import PaddedShape, local_shape, shard
from runtime.ops.fp8.narrow_weights import DTYPE, in_8_bits
from runtime.ops.fp8.weight_scales import WeightScales, start_of


@pytest.mark.parametrize(("rows", "ranks"), [(512, 4), (300, 7), (256, 3), (496, 32)])
def test_blocks_are_those_of_the_whole_weight(rows: int, ranks: int) -> None:
    """Also where pieces are filled up with zeros (300, 256), and where one has nothing else (496 over 32)."""
    shape, layout = PaddedShape((rows, BLOCK)), (shard(0),)
    weight = torch.randn(rows, BLOCK, generator=torch.Generator().manual_seed(0))
    weight *= 10.0 ** (torch.arange(rows) // BLOCK)[:, None]  # each block has its own scale
    blocks = torch.arange(rows) // BLOCK
    most = largest(weight, blocks, -(-rows // BLOCK), torch.zeros(BLOCK, dtype=torch.int64), 1)
    scales = scale_of(most, DTYPE)
    wanted = in_8_bits(weight, scales[blocks], DTYPE)
    length = local_shape(shape, layout, (ranks,))[0]
    padded = torch.cat([weight, torch.zeros(length * ranks - rows, BLOCK)])
    seen, sent = torch.zeros_like(most), []
    for at, piece in enumerate(padded.split(length)):
        place = cast(Any, SimpleNamespace(mesh=SimpleNamespace(sizes=(ranks,)), coordinate=(at,)))
        start = start_of(shape, layout, place)
        own = WeightScales(name="weight", largest=torch.zeros_like(most), scales=scales, start=start)
        own.see(piece)
        seen = torch.maximum(seen, own.largest)
        sent.append(own.in_8_bits(piece))
    assert seen.equal(most)
    assert torch.cat(sent)[:rows].float().equal(wanted.float())
