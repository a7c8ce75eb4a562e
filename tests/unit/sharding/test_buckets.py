"""Who travels with whom: by size, by position, by name."""

from collections.abc import Sequence

import pytest

from planner.sharding.buckets import Bucket, Traveller, in_buckets, in_room, traveller
from planner.sharding.layout import PARTIAL, REPLICATE, shard
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.update import Buckets

MESH = Mesh(axes=(MeshAxis(name="data", size=4, stride=1, bandwidth=1e9),))
SUM, CUT = (REPLICATE,), (shard(0),)


def going(name: str, rows: int, target: tuple = SUM, dtype: str = "float32") -> Traveller:
    return traveller(name, (rows, 8), dtype, 4, MESH, (PARTIAL,), target)


def found(travellers: Sequence[Traveller], buckets: Buckets, alone: frozenset[str] = frozenset()) -> list[str]:
    positions = {one.name: at for at, one in enumerate(reversed(travellers))}
    return [" ".join(bucket.names) for bucket in in_buckets(travellers, buckets, positions, alone)]


def test_a_bucket_ends_before_it_is_too_large() -> None:
    travellers = [going(name, rows) for name, rows in zip("abcde", (4, 4, 40, 4, 8), strict=True)]
    assert found(travellers, 256) == ["a b", "c", "d", "e"]
    assert found(travellers, 384) == ["a b", "c", "d e"]
    assert found(travellers, 10**6) == ["a b c d e"]
    assert found(travellers, 1) == list("abcde")


def test_members_move_alike() -> None:
    """Kinds of collectives, axes and dtypes; each kind has a bucket open, and they go in the order of their last."""
    travellers = [going("a", 4), going("b", 4, CUT), going("c", 4, dtype="bfloat16"), going("d", 4), going("e", 4, CUT)]
    assert found(travellers, 10**6) == ["c", "a d", "b e"]
    assert [bucket.moves for bucket in in_buckets(travellers, 10**6, dict.fromkeys("abcde", 0), frozenset())] == [
        (("all_reduce", 0),),
        (("all_reduce", 0),),
        (("reduce_scatter", 0),),
    ]


def test_positions_count_in_the_order_of_the_model() -> None:
    """The head arrives first: e is parameter 0."""
    travellers = [going(name, 4) for name in "abcde"]
    assert found(travellers, (2, 4)) == ["a", "b c", "d e"]


def test_names_and_numbers() -> None:
    travellers = [going(name, 4) for name in ("attn.1", "mlp.1", "norm", "attn.0", "mlp.0")]
    assert found(travellers, (("attn*", 0), ("mlp*", 1))) == ["norm", "attn.1 attn.0", "mlp.1 mlp.0"]
    assert found(travellers, (("attn*", 3), ("mlp*", 3))) == ["norm", "attn.1 mlp.1 attn.0 mlp.0"]


def test_who_sends_nothing_is_in_no_bucket_and_who_is_alone_shares_none() -> None:
    still = traveller("still", (4, 8), "float32", 4, MESH, SUM, CUT)  # a slice
    assert found([going("a", 4), still, going("b", 4)], 10**6) == ["a b"]
    assert found([going("a", 4), going("b", 4), going("c", 4)], 10**6, frozenset("b")) == ["b", "a c"]


def test_bytes_are_those_of_the_members() -> None:
    bucket = Bucket(members=(going("a", 4, CUT), going("b", 8, CUT)))
    assert bucket.nbytes == (12 * 8 * 4,)
    assert bucket.flat == 12 * 8 * 4
    assert Bucket(members=(going("a", 4),)).flat == 0.0


@pytest.mark.parametrize("buckets", [64, (2,), (("*", 1),)])
def test_everybody_travels_once(buckets: Buckets) -> None:
    travellers = [going(str(at), 4 * (1 + at % 3), CUT if at % 4 else SUM) for at in range(20)]
    names = " ".join(found(travellers, buckets)).split()
    assert sorted(names) == sorted(one.name for one in travellers)


def test_buckets_that_are_summed_wait_for_none() -> None:
    """What an all-reduce is sent from takes the place of its members: any number may be under way."""
    buckets = [Bucket(members=(going(f"{at} a", 4), going(f"{at} b", 4))) for at in range(5)]
    starts = in_room(buckets, MESH, 2 * 256)
    assert (starts.early, starts.landed, starts.room) == (5, (0,) * 5, 256)


def test_buckets_that_are_scattered_wait_where_the_room_is_used_up() -> None:
    """Pieces that come out, 64 bytes of 256, take memory beside what is still under way; the first has 192 free when
    it has landed, so that some of those after it need not wait for all before them."""
    buckets = [Bucket(members=(going(f"{at} a", 4, CUT), going(f"{at} b", 4, CUT))) for at in range(5)]
    starts = in_room(buckets, MESH, 2 * 256)
    assert (starts.early, starts.room) == (5, 256 + 64)
    assert starts.landed == (0, 1, 1, 1, 1)


def test_buckets_behind_the_backward_pass_go_one_by_one() -> None:
    small, large = Bucket(members=(going("a", 4), going("b", 4))), Bucket(members=(going("c", 40), going("d", 40)))
    starts = in_room([large, small, large], MESH, 512)
    assert starts.buckets == (small, large, large)
    assert (starts.early, starts.landed) == (1, (0, 1, 2))
