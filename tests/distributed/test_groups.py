"""The processes of a plan by name: on four ranks, what a collective of each group reaches."""

import pytest


@pytest.mark.parametrize(
    ("kind", "sizes", "stages", "expected"),
    [
        ("megatron", (2, 2), None, {"data": [{0, 2}, {1, 3}], "tensor": [{0, 1}, {2, 3}], "axis0": [{0, 2}, {1, 3}]}),
        ("zero1", (2, 2), None, {"data": [{0, 1, 2, 3}], "axis1": [{0, 1}, {2, 3}], "world": [{0, 1, 2, 3}]}),
        ("zero1", (2,), (1, 1), {"data": [{0, 1}, {2, 3}], "pipeline": [{0, 2}, {1, 3}], "world": [{0, 1, 2, 3}]}),
    ],
    ids=str,
)
def test_groups_by_name(
    pool, kind: str, sizes: tuple[int, ...], stages: tuple[int, ...] | None, expected: dict[str, list[set[int]]]
) -> None:
    answers = pool.run("tasks_groups", "groups", kind, sizes, stages)
    for rank, (found, refusal) in enumerate(answers):
        assert "group 'data': the role of a mesh axis is known once the model has been traced" in refusal
        for name, (place, size, ranks, reached) in found.items():
            assert ranks[place] == rank, name
            assert (len(ranks), list(ranks)) == (size, reached), name
            parts = expected.get(name)
            if parts is not None:
                assert set(ranks) in parts, name
        named = [name for name in ("tensor", "context", "expert", "replicated") if name not in expected]
        assert all(found[name][1] == 1 for name in named)
