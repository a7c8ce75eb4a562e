"""What is dropped: uniform, independent of everything but the place of an element, and the same for every layout."""

import itertools
import math

import pytest
import torch

from planner.sharding.layout import PARTIAL, REPLICATE, divides, shard
from planner.sharding.mesh import Mesh, MeshAxis
from runtime.comm.device_mesh import Communicators, RankMesh
from runtime.ops import randomness
from runtime.ops.randomness import Draw, Region, drop, keep_mask, operator_code, region_of, whole_region

CPU = torch.device("cpu")
P = 0.25
KEY = Draw(seed=3).key(operator_code("block/dropout"))


def mask(key: int, shape: tuple[int, ...], start: tuple[int, ...] | None = None, p: float = P) -> torch.Tensor:
    return keep_mask(key, Region(start=start or (0,) * len(shape), shape=shape), p, CPU)


def deviations(found: int, count: int, p: float) -> float:
    """How many standard deviations a count of events of probability p lies from its mean."""
    return abs(found - count * p) / math.sqrt(count * p * (1 - p))


def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far, in standard deviations, the number of places where both keep is from that of independent masks."""
    return deviations(int((one & other).sum()), one.numel(), (1 - P) ** 2)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.9])
@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000), (10, 10, 100, 100), (1_000_000, 1)], ids=str)
def test_the_rate_is_that_asked_for(shape: tuple[int, ...], p: float) -> None:
    for number in range(2):
        kept = mask(Draw(step=number).key(7), shape, p=p)
        assert deviations(int(kept.sum()), kept.numel(), 1 - p) < 5


def test_nothing_and_everything() -> None:
    assert not mask(KEY, (4, 8), p=1.0).any()
    assert mask(KEY, (4, 8), p=0.0).all()
    assert mask(KEY, ()).shape == ()
    assert mask(KEY, (4, 0)).shape == (4, 0)


def test_rates_in_every_row_and_column_scatter_as_those_of_independent_elements() -> None:
    """Chi-square of the counts against the binomial, over rows and over columns: mean n, variance 2 n."""
    kept = mask(KEY, (1000, 1000)).double()
    for counts in (kept.sum(0), kept.sum(1)):
        chi = float(((counts - 1000 * (1 - P)) ** 2 / (1000 * P * (1 - P))).sum())
        assert abs(chi - 1000) < 5 * math.sqrt(2 * 1000), chi


def test_all_bytes_of_the_numbers_are_uniform() -> None:
    """Chi-square of every byte of the 32 bits, 255 degrees of freedom."""
    states = randomness._row_states(KEY, [0], [1000], CPU)
    numbers = randomness._numbers(states, torch.arange(1000, dtype=torch.int32)).flatten()
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((numbers >> shift & 0xFF).long(), minlength=256).double()
        expected = numbers.numel() / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), (shift, chi)


@pytest.mark.parametrize("offset", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (0, 64), (16, 0), (256, 256)], ids=str)
def test_neighbours_are_independent(offset: tuple[int, int]) -> None:
    kept = mask(KEY, (1024, 1024))
    moved = kept.roll(offset, (0, 1))
    assert agreement(kept, moved) < 5


def test_transposed_indices_are_independent() -> None:
    square = mask(KEY, (1000, 1000))
    upper = torch.ones(1000, 1000, dtype=torch.bool).triu(1)
    assert agreement(square[upper], square.t()[upper]) < 5
    cube = mask(KEY, (100, 100, 100))
    for dims in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        distinct = torch.ones(100, 100, dtype=torch.bool).triu(1).unsqueeze(-1).expand(100, 100, 100)
        assert agreement(cube[distinct], cube.permute(dims)[distinct]) < 5


def test_seeds_steps_micro_batches_and_operators_are_independent() -> None:
    draws = [
        Draw(seed=seed, step=step, micro_batch=part) for seed, step, part in itertools.product((0, 1), (0, 1), (0, 1))
    ]
    keys = [draw.key(operator_code(name)) for draw in draws for name in ("a/dropout", "a/dropout_2", "b/dropout")]
    assert len(set(keys)) == len(keys)
    masks = [mask(key, (256, 256)) for key in keys]
    assert max(agreement(one, other) for one, other in itertools.combinations(masks, 2)) < 5.5


def test_rows_never_repeat() -> None:
    """Rows are told apart by 64 bits, not by the 32 of their numbers."""
    states = randomness._row_states(KEY, [0, 0], [1000, 1000], CPU)
    assert len(states.unique()) == 1_000_000


@pytest.mark.parametrize("shape", [(2**33,), (2**20, 2**20), (3, 2**31, 2**31)], ids=str)
def test_indices_beyond_32_bits(shape: tuple[int, ...]) -> None:
    """A piece far inside is what it is wherever it is cut, and not that at the index modulo 2**32 or 2**24."""
    far = tuple(extent - 70_000 if extent > 70_000 else 0 for extent in shape)
    extents = (*(2 for _ in shape[:-1]), 65_000)
    piece = mask(KEY, extents, far)
    half = mask(KEY, (*extents[:-1], 500), (*far[:-1], far[-1] + 1000))
    assert piece[..., 1000:1500].equal(half)
    for modulus in (2**32, 2**24):
        near = tuple(start % modulus for start in far)
        if near != far:
            assert agreement(piece, mask(KEY, extents, near)) < 5


def test_a_long_row_is_put_together_from_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask(KEY, (4, 100))
    monkeypatch.setattr(randomness, "_AT_ONCE", {"cpu": 7})
    assert mask(KEY, (4, 100)).equal(whole)
    monkeypatch.setattr(randomness, "_COLUMNS", 16)
    long = mask(KEY, (4, 100))
    assert torch.cat([mask(KEY, (4, 9), (0, at)) for at in range(0, 99, 9)], 1).equal(long[:, :99])
    assert agreement(long[:, :16], long[:, 16:32]) < 5


MESHES = ((4,), (2, 2), (2, 4), (3, 2, 2))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_shards_are_slices_of_the_whole_under_every_layout(sizes: tuple[int, ...]) -> None:
    axes = tuple(
        MeshAxis(name=f"axis{i}", size=size, stride=math.prod(sizes[i + 1 :]), bandwidth=1e9)
        for i, size in enumerate(sizes)
    )
    mesh = Mesh(axes=axes)
    shape = (24, 48, 16)
    whole = mask(KEY, shape)
    for layout in itertools.product((REPLICATE, PARTIAL, shard(0), shard(1), shard(2)), repeat=len(sizes)):
        if not divides(shape, layout, sizes):
            continue
        pieces = []
        for rank in range(mesh.size):
            place = RankMesh(
                mesh=mesh, rank=rank, device=CPU, groups=(None,) * len(sizes), stage=0, stages=1, known=Communicators()
            )
            pieces.append(keep_mask(KEY, region_of(shape, layout, place), P, CPU))
        for placement, size in reversed(list(zip(layout, sizes, strict=True))):
            groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
            if not placement.is_shard:
                assert all(piece.equal(group[0]) for group in groups for piece in group)
            pieces = [torch.cat(group, placement.dim) if placement.is_shard else group[0] for group in groups]
        assert pieces[0].equal(whole), layout


def test_torchs_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = mask(KEY, (64, 64))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(1)
    assert mask(KEY, (64, 64)).equal(one)


def test_dropping_scales_what_is_kept_and_its_gradient() -> None:
    x = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    keep = mask(KEY, (64, 32))
    y = drop(x, keep, P)
    torch.testing.assert_close(y, torch.where(keep, x / (1 - P), 0.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(keep, 1 / (1 - P), 0.0).double())
    assert not drop(x, mask(KEY, (64, 32), p=1.0), 1.0).any()
    assert whole_region((3, 4)) == Region(start=(0, 0), shape=(3, 4))
