"""Checkpoints without processes: slices of any plan make the same whole, and what is damaged is refused by name."""

import json
import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from planner.errors import CheckpointError
from planner.sharding.layout import REPLICATE, shard
from runtime.checkpoint import folder as folders
from runtime.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from runtime.checkpoint.offline import convert, merge
from runtime.checkpoint.opening import open_run
from runtime.checkpoint.regions import Region, blocks, can_be_cut, cell_number, cell_region, cells_meeting, whole
from runtime.checkpoint.source import INDEX, SINGLE, open_checkpoint
from runtime.checkpoint.spread import writers
from runtime.checkpoint.tensor_files import Entry, write_tensors
from runtime.run_folder.identity import RECORD
from runtime.run_folder.lock import LOCK
from tests.distributed import plans
from tests.refusals import refused
from tests.unit.runtime.checkpoint_states import (
    bound_of,
    homes_of,
    manifest_of,
    plan_of,
    refusal,
    state_of,
    wider,
    write,
)

PIPELINES = (
    {"stages": (3, 1), "micro_batches": 2},
    {"stages": (1, 3), "micro_batches": 4},
    {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 4},
)


def drawn(random_: random.Random, model: str) -> tuple[object, tuple[int, ...], dict[str, object]]:
    """How a plan is made: by hand with ZeRO, at random on one or two axes, with or without stages."""
    kind = random_.choice(["zero1", "zero2", "zero3", "random", "random", "pipeline", "pipeline"])
    if kind.startswith("zero"):
        return kind, (random_.choice([2, 4]),), {}
    sizes = random_.choice([(1,), (2,), (4,), (2, 2)])
    return random_.randrange(1000), sizes, random_.choice(PIPELINES) if kind == "pipeline" else {}


PAIRS = [(random.Random(number).choice(["llama4", "mixture4", "gpt4"]), number) for number in range(30)]


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "number"), PAIRS)
def test_slices_of_any_plan_become_those_of_any_other(model: str, number: int, tmp_path: Path) -> None:
    random_, state = random.Random(number), state_of(model)
    made = [drawn(random_, model) for _ in range(2)]
    first, then = (plan_of(model, kind, sizes, **settings) for kind, sizes, settings in made)
    write(model, first, tmp_path / "first")
    source = open_checkpoint(tmp_path / "first")
    source.check()
    bound = bound_of(model, then)
    convert(source, read_manifest(tmp_path / "first"), bound, homes_of(model, bound), tmp_path / "then", most=777)
    found = open_checkpoint(tmp_path / "then")
    found.check()
    assert found.tensors.keys() == state.contents.keys()
    for name, wanted in state.contents.items():
        assert torch.equal(found.read(name), wanted), name
    merge(found, read_manifest(tmp_path / "then"), tmp_path / "merged", shard=20_000, most=500)
    merge(state, manifest_of(state), tmp_path / "wanted", shard=20_000, most=10**9)
    files = sorted(path.name for path in (tmp_path / "wanted").iterdir() if path.name != MANIFEST)
    assert len(files) > 2
    for name in files:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name


@pytest.mark.thorough
def test_merged_files_are_read_by_the_library_and_by_a_plain_module(tmp_path: Path) -> None:
    state = state_of("balanced")
    merge(state, manifest_of(state), tmp_path / "merged", shard=20_000)
    index = json.loads((tmp_path / "merged" / INDEX).read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(tmp_path / "merged" / name))
    assert {name: found[name].shape for name in index["weight_map"]}.keys() == found.keys()
    module = plans.build("balanced")
    module.load_state_dict(found, strict=True)  # buffers that change after a step among them
    assert all(torch.equal(value, state.contents[name]) for name, value in module.state_dict().items())


def test_a_file_is_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(2.5), "c": torch.ones(3, dtype=torch.bool)}
    tensors["d"] = torch.randn(4).bfloat16()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    entries = [
        Entry(
            name=name,
            dtype=str(t.dtype).removeprefix("torch."),
            shape=tuple(t.shape),
            blocks=lambda t=t: (t,),  # type: ignore[misc]
        )
        for name, t in tensors.items()
    ]
    saved = write_tensors(tmp_path / "ours.safetensors", entries, {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert saved.bytes == (tmp_path / "ours.safetensors").stat().st_size


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests copy before they break it."""
    folder = tmp_path_factory.mktemp("pristine") / "step-000007"
    write("llama", plan_of("llama", "zero3", (2,)), folder)
    return folder


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(bytes(content))


def foreign(path: Path) -> None:
    """Another good file of just this size."""
    content = load_file(path)
    save_file({name: value + 1 for name, value in content.items()}, path)
    path.write_bytes(path.read_bytes())


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1, 2, 3]}))


BROKEN = {
    "truncated": (truncated, "rank-00001.safetensors: is truncated"),
    "lengthened": (lengthened, "rank-00001.safetensors: is too long"),
    "flipped": (flipped, "rank-00001.safetensors: is damaged, or of another checkpoint: its checksum is"),
    "missing": (Path.unlink, "rank-00001.safetensors: is missing"),
    "foreign": (foreign, "rank-00001.safetensors: is "),
    "pipe": (a_pipe, "rank-00001.safetensors: is not a regular file"),
    "pickled": (pickled, "rank-00001.safetensors: is truncated"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_refused_by_name(how: str, pristine: Path, tmp_path: Path) -> None:
    spoil, message = BROKEN[how]
    copied = _copy(pristine, tmp_path)
    spoil(copied / "rank-00001.safetensors")
    found = refusal(lambda: open_checkpoint(copied).check())
    assert message in found
    assert "\n" not in found


@pytest.mark.thorough
def test_each_bit_of_a_file_counts(pristine: Path, tmp_path: Path) -> None:
    copied, random_ = _copy(pristine, tmp_path), random.Random(0)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST):
        whole_file = (copied / name).read_bytes()
        for _ in range(40):
            content = bytearray(whole_file)
            content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
            (copied / name).write_bytes(bytes(content))
            if name == MANIFEST and _means_the_same(bytes(content), whole_file):
                continue
            assert name in refusal(lambda: open_checkpoint(copied).check())
        (copied / name).write_bytes(whole_file)
    open_checkpoint(copied).check()


def _means_the_same(first: bytes, other: bytes) -> bool:
    """A space that became another, for one."""
    try:
        return bool(json.loads(first) == json.loads(other))
    except ValueError:
        return False


def test_a_file_of_another_checkpoint_is_refused_when_it_is_read(pristine: Path, tmp_path: Path) -> None:
    copied = _copy(pristine, tmp_path)
    write("llama", plan_of("llama", "zero3", (4,)), tmp_path / "four")
    (tmp_path / "four" / "rank-00001.safetensors").replace(copied / "rank-00001.safetensors")
    manifest = read_manifest(copied)
    sizes = {file.name: (copied / file.name).stat().st_size for file in manifest.files}
    files = tuple(replace(file, bytes=sizes[file.name]) for file in manifest.files)
    write_manifest(copied, replace(manifest, files=files))
    source = open_checkpoint(copied)
    found = refusal(lambda: [source.read(name) for name in source.tensors])  # checksums were not looked at
    assert "rank-00001.safetensors: is of another checkpoint: it has " in found


MANIFESTS = {
    "a path": (lambda c: c["files"][0].update(name="../x.safetensors"), "is not the name of a tensor file"),
    "a pickle": (lambda c: c["files"][0].update(name="x.pt"), "is not the name of a tensor file"),
    "a cell too few": (lambda c: c["tensors"]["lm_head.weight"]["files"].pop(), "cells in files that are not listed"),
    "cuts": (lambda c: c["tensors"]["lm_head.weight"].update(cuts=[0xFFFF, 1]), "cannot be cut"),
    "another format": (lambda c: c.update(format_version=3), "is of format 3, and this version reads 1 and 2"),
    "a key": (lambda c: c.update(more=1), "more: "),
    "dims": (
        lambda c: c["tensors"]["lm_head.weight"].update(shape=[2**62] * 40_000, cuts=[2**62] * 40_000),
        "40000 dims",
    ),
    "a kind": (lambda c: c.update(kind="x"), "kind: "),
}


@pytest.mark.parametrize("how", MANIFESTS)
def test_a_manifest_that_was_edited_is_refused(how: str, pristine: Path, tmp_path: Path) -> None:
    import xxhash

    copied = _copy(pristine, tmp_path)
    content = json.loads((copied / MANIFEST).read_text())["content"]
    spoil, message = MANIFESTS[how]
    spoil(content)
    text = json.dumps(content, separators=(",", ":"))
    (copied / MANIFEST).write_text(json.dumps({"digest": xxhash.xxh3_128_hexdigest(text.encode()), "content": content}))
    found = refusal(lambda: read_manifest(copied))
    assert message in found
    assert MANIFEST in found


def test_a_pipe_in_the_place_of_a_file_of_tensors_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert "a.safetensors: is not a regular file" in refusal(lambda: open_checkpoint(tmp_path))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: open_checkpoint(tmp_path / "x"))
    assert "has no complete checkpoint" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps([1]))
    assert "they can run code" in refusal(lambda: open_checkpoint(tmp_path))
    assert "they can run code" in refusal(lambda: open_checkpoint(tmp_path / "pytorch_model.bin"))
    (tmp_path / SINGLE).write_bytes(pickle.dumps([1]))
    assert f"{SINGLE}: is not a tensor file" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    assert "is not the name of a file in this folder" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "b.safetensors: is missing" in refusal(lambda: open_checkpoint(tmp_path))
    save_file({"c": torch.ones(1)}, tmp_path / "b.safetensors")
    assert "b.safetensors: lacks 'a'" in refusal(lambda: open_checkpoint(tmp_path))


def test_all_differences_are_listed(tmp_path: Path) -> None:
    """A checkpoint of a model with fewer heads, more blocks and another dtype."""
    write("llama4", plan_of("llama4", "zero1", (2,)), tmp_path / "a")
    source, manifest = open_checkpoint(tmp_path / "a"), read_manifest(tmp_path / "a")
    for model, said in (
        ("llama", ("not in the model: model.layers.2.input_layernorm.weight, ", " and ", " more")),
        ("llama6", ("it lacks: ", "model.layers.4.", "more")),
        ("mixture4", ("it lacks: ", "not in the model: ")),
    ):
        bound = bound_of(model, plan_of(model, "zero1", (2,)))
        found = refusal(
            lambda bound=bound, model=model: convert(source, manifest, bound, homes_of(model, bound), tmp_path / "b")
        )
        assert "does not fit this model" in found
        assert all(word in found for word in said), found
    assert not (tmp_path / "b").exists()
    bound = bound_of("llama4", wider(plan_of("llama4", "zero1", (2,)), optimizer="sgd"))
    found = refusal(lambda: convert(source, manifest, bound, {}, tmp_path / "b"))
    assert "has optimizer states of adamw, but the plan trains with sgd" in found
    narrow = {
        **state_of("llama4").contents,
        "lm_head.weight": torch.ones(32, 16),
        "model.norm.weight": torch.ones(32).half(),
    }
    other = replace(state_of("llama4"), contents=narrow)
    bound = bound_of("llama4", plan_of("llama4", "zero1", (2,)))
    found = refusal(lambda: convert(other, manifest_of(other), bound, {}, tmp_path / "b"))
    assert "other shape: lm_head.weight [32, 16], not [32, 32]" in found
    assert "other dtype: model.norm.weight float16, not float32" in found


def test_a_folder_has_whole_checkpoints_only(pristine: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    opened = open_run(runs)
    folder = opened.folder

    def part_of(step: int, token: str) -> Path:
        part = folder.make_part(step, token)
        for path in pristine.glob("[!.]*"):
            shutil.copy(path, part)
        return part

    def there() -> list[str]:
        return sorted(path.name for path in runs.iterdir() if path.name not in (RECORD, LOCK))

    for step in (7, 14, 21, 28):
        part = part_of(step, "aa")
        assert folders.newest(runs) == (runs / folders.name_of(step - 7) if step > 7 else None)
        assert folder.publish(part, step, "aa", keep=9) == []
    gone = folder.publish(part_of(28, "bb"), 28, "bb", keep=2)  # the same step once more
    assert len(gone) == 3
    assert [path.name for path in folders.checkpoints(runs)] == ["step-000021", "step-000028"]
    folder.delete(gone)
    assert there() == ["step-000021", "step-000028"]
    assert open_checkpoint(runs).path == runs / "step-000028"
    # a run that ended at three moments: while writing, between two renames, while deleting
    part_of(35, "cc")
    (runs / "step-000028").rename(runs / ".step-000028.cc.old")
    (runs / "step-000021").rename(runs / ".step-000021.cc.gone")
    assert folders.newest(runs) is None
    assert folder.prepare() == ()
    assert there() == ["step-000028"]
    (runs / "step-000028" / MANIFEST).unlink()
    assert folders.newest(runs) is None
    opened.close()


def test_writing_is_shared_out_evenly() -> None:
    """All ranks hold all of a model that is only data parallel; each writes about a quarter."""
    from runtime.checkpoint.spread import StateOfPlan

    bound = bound_of("llama8", plan_of("llama8", "zero1", (4,)))
    spreads = StateOfPlan(bound=bound).tensors(("exp_avg", "exp_avg_sq"), 1, {})
    mesh, load = bound.plan.mesh, [0.0] * 4
    found = writers(spreads, mesh, 1)
    for spread in spreads:
        for cell, rank in enumerate(found[spread.name]):
            assert spread.cell(mesh, rank) == cell or spread.cuts(mesh) == (1,) * len(spread.shape)
            load[rank] += cell_region(spread.shape, spread.cuts(mesh), cell).elements
    assert max(load) < 1.02 * min(load)


SHAPES = st.lists(st.sampled_from([1, 2, 4, 5, 6, 12]), max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_cells_that_meet_a_box_have_all_of_it_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    cuts = tuple(data.draw(st.sampled_from([c for c in (1, 2, 3, 4) if can_be_cut(size, c)])) for size in shape)
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    box, seen = Region(offset=starts, extent=extent), torch.zeros(shape)
    for number, cell in cells_meeting(shape, cuts, box):
        assert cell == cell_region(shape, cuts, number)
        common = box.common(cell)
        assert common.elements
        seen[common.within(whole(shape))] += 1
    wanted = torch.zeros(shape)
    wanted[box.within(whole(shape))] += 1
    assert torch.equal(seen, wanted)
    most = data.draw(st.integers(1, 30))
    tensor = torch.arange(float(box.elements)).view(extent)
    parts = [tensor[part.within(box)].reshape(-1) for part in blocks(box, most)]
    assert all(part.numel() <= most for part in parts)
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))


def test_the_first_axis_that_cuts_a_dim_cuts_it_coarsest() -> None:
    layout, sizes = (shard(0), REPLICATE, shard(0), shard(1)), (2, 3, 2, 2)
    assert cell_number(2, layout, sizes, (1, 2, 0, 1)) == 2 * 2 + 1
    assert cell_region((8, 6), (4, 2), 5) == Region(offset=(4, 3), extent=(2, 3))


def _copy(folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "step-000007"
    shutil.copytree(folder, copied)
    return copied


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    plan = plan_of("llama", "zero1", (2,))
    write("llama", plan, tmp_path / "a")
    with refused(CheckpointError, tmp_path / "a"):
        write("llama", plan, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
