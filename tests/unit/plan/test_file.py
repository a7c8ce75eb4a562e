"""Plan files read back exactly, are written whole or not at all, and are refused with the place and the remedy."""

import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import LayoutError, PlanFileError, PlannerError, StrategyError
from planner.plan import writing
from planner.plan.binding.legality import check_stages
from planner.plan.file import dump_plan, format_strategy, load_plan, parse_plan, parse_strategy, save_plan
from planner.plan.plan import Stage
from tests import refusals
from tests.unit.plan.plans import NAMES, Content, Edit, drop, edited, plan_named, put, verdict_of

BLOCKS = ("groups", 1)  # the group of the blocks in the plan "two axes"
Q_PROJ = "model.layers.0.self_attn.q_proj/linear"
ATTENTION = "model.layers.0.self_attn/scaled_dot_product_attention"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_reads_back_exactly(name: str, tmp_path: Path) -> None:
    plan = plan_named(name)
    path = tmp_path / "new" / "folder" / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert path.read_text(encoding="utf-8") == dump_plan(load_plan(path)) == dump_plan(plan)
    assert path.read_bytes().endswith(b"}\n")
    assert os.listdir(path.parent) == ["plan.json"]


@pytest.mark.thorough
def test_the_plans_are_of_different_forms() -> None:
    plans = {name: plan_named(name) for name in NAMES}
    assert plans["no axes"].mesh.sizes == ()
    assert plans["one axis"].mesh.sizes == (4,)
    assert plans["two axes"].mesh.sizes == (2, 8)
    assert [stage.first_block for stage in plans["pipeline"].stages] == [0, 1, 2, 3]
    assert [group.recomputation for group in plans["pipeline"].groups if group.blocks] == ["full"]
    several = [group for group in plans["several groups"].groups if group.blocks]
    assert len(several) > 1
    assert sum(group.blocks for group in several) == 4
    assert {group.recomputation for group in several} <= {"selective", "full", "none"}
    assert plans["only stages"].mesh.sizes == ()
    assert len(plans["only stages"].stages) == 2
    assert [group.name for group in plans["no blocks"].groups] == ["all"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("seed", ["0", "4711"])
def test_a_fresh_process_writes_the_same_bytes(seed: str) -> None:
    """Sets and dicts of another process have another order; nothing of it may reach the file."""
    script = (
        "import sys; from tests.unit.plan.plans import plan_named; from planner.plan.file import dump_plan;"
        "sys.stdout.write(dump_plan(plan_named('two axes')) + dump_plan(plan_named('pipeline')))"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == dump_plan(plan_named("two axes")) + dump_plan(plan_named("pipeline"))


@pytest.mark.parametrize("strategy", [(), (None,), ("b",), ("b", None), (None, "o", "copies")])
def test_strategies_are_one_word_an_axis(strategy: tuple[str | None, ...]) -> None:
    assert parse_strategy(format_strategy(strategy)) == strategy


def refused(text: str) -> str:
    with pytest.raises(PlanFileError) as caught:
        parse_plan(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


WHOLE = "two axes"
EMPTY = {"recomputation": "none", "kept": [], "operators": {}, "parameters": {}}
UNREADABLE: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "other version": (put("schema_version", value=3), ("schema_version is 3", "versions 1 and 2", "plan again")),
    "true version": (put("schema_version", value=True), ("schema_version is True",)),
    "missing key": (drop("stages"), ("stages", "undo the edit or plan again")),
    "unknown key": (put("colour", value="red"), ("colour", "undo the edit or plan again")),
    "nested unknown key": (put("training", "epochs", value=3), ("training.epochs",)),
    "wrong type": (put("stages", value="four"), ("stages", "not a list")),
    "text for a number": (put("training", "global_batch", value="8"), ("training.global_batch", "whole number")),
    "truth for a number": (put("training", "micro_batches", value=True), ("training.micro_batches", "whole number")),
    "fraction": (put("cluster", "devices", value=16.5), ("cluster.devices",)),
    "negative": (put("training", "global_batch", value=-8), ("training.global_batch", "1")),
    "negative time": (put("prediction", "step_seconds", value=-1.0), ("prediction.step_seconds",)),
    "not finite": (put("provenance", "gap", value=float("nan")), ("provenance.gap", "finite")),
    "infinite": (put("prediction", "peak_bytes", value=float("inf")), ("prediction.peak_bytes", "finite")),
    "absurd batch": (put("training", "global_batch", value=10**30), ("training.global_batch", "64 bits")),
    "absurd block": (put("groups", 1, "blocks", value=10**30), ("groups.1.blocks",)),
    "absurd length": (put("model", "sequence_length", value=10**30), ("model.sequence_length",)),
    "absurd bytes": (put("prediction", "peak_bytes", value=10**400), ("prediction.peak_bytes",)),
    "no stages": (put("stages", value=[]), ("stages",)),
    "mesh and devices": (put("cluster", "devices", value=32), ("16 devices in each of 1", "devices is 32")),
    "stride": (put("mesh", 0, "stride", value=4), ("mesh", "stride 4", "8")),
    "two axes of a name": (put("mesh", 0, "name", value="axis1"), ("mesh", "different names")),
    "parts": (put("training", "micro_batches", value=3), ("training.micro_batches", "3", "global batch 8")),
    "precision": (put("training", "precision", value="fp8"), ("training.precision", "fp8", "bf16, fp16, fp32")),
    "optimizer": (put("training", "optimizer", value="adam"), ("training.optimizer", "adamw, sgd")),
    "schedule": (put("schedule", value="dualpipe"), ("schedule", "1f1b, gpipe")),
    "recomputation": (
        put(*BLOCKS, "recomputation", value="some"),
        ("groups.1.recomputation", "'some'", "none, selective, full"),
    ),
    "recomputation of version 1": (put("recomputation", value="full"), ("recomputation", "undo the edit")),
    "uneven virtual stages": (put("virtual_stages", value=2), ("virtual_stages", "do not divide 1 stages")),
    "no virtual stages": (put("virtual_stages", value=0), ("virtual_stages", "1")),
    "layout": (put(*BLOCKS, "parameters", WEIGHT, "weight", value="S0,X"), ("groups.1", WEIGHT, "'X'", "R, P or S")),
    "long layout": (put(*BLOCKS, "parameters", WEIGHT, "weight", value="S" + "9" * 9999), (WEIGHT,)),
    "control character": (put("model", "reference", value="a\x1b[31m\nb"), ("reference", "control character", "\\x1b")),
    "control character in a key": (put("inputs", "a\nb", value="R,R"), ("'a\\nb'", "control character")),
    "half a surrogate": (put("groups", 1, "name", value="\ud800"), ("name", "\\ud800")),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_named(case: str) -> None:
    edit, words = UNREADABLE[case]
    message = refused(edited(WHOLE, edit))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("it is empty", "truncated")),
        ("[]", ("no schema_version",)),
        ('# cpu, corrected\n\nid = "mine"\n', ("not a plan file", "not JSON", "plan --model")),
        ("3", ("no schema_version",)),
        ("null", ("no schema_version",)),
        ("{}", ("no schema_version",)),
        ("[" * 100_000, ("nested too deeply",)),
        ('{"a":' * 100_000, ("nested too deeply",)),
        ('{"schema_version": ' + "9" * 5000 + "}", ("number is too long",)),
        ('{"schema_version": 1, "schema_version": 1}', ("'schema_version'", "twice", "keep one")),
        ('{"schema_version": 1, "mesh": [{"size": 1, "size": 2}]}', ("'size'", "twice")),
        ('{"schema_version": "1\\n"}', ("schema_version", "control character")),
    ],
)
def test_what_is_no_plan_is_refused(text: str, words: tuple[str, ...]) -> None:
    message = refused(text)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share: float) -> None:
    text = dump_plan(plan_named(WHOLE))
    assert "truncated" in refused(text[: int(len(text) * share)])


def test_files_that_are_none(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(bytes(range(256)))
    for path, words in (
        (binary, "not UTF-8"),
        (tmp_path, "it is a directory"),
        (Path("/dev/zero"), "it is a pipe or a device"),
        (tmp_path / "none.json", "No such file"),
        (tmp_path / "binary.json" / "x.json", "Not a directory"),
        (tmp_path / "a\0b", "null byte"),
    ):
        with pytest.raises(PlanFileError) as caught:
            load_plan(path)
        assert str(path) in str(caught.value)
        assert words in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf" + dump_plan(plan_named(WHOLE)).encode())
    assert load_plan(path) == plan_named(WHOLE)


SHARED = "model.layers.0.input_layernorm/rms_norm/shared"


def selective(*kept: str) -> Edit:
    """An edit that recomputes the blocks but for these operators."""

    def edit(content: Content) -> None:
        content["groups"][1].update(recomputation="selective", kept=list(kept))

    return edit


def virtual(count: int, stages: list[tuple[int, int]]) -> Edit:
    """An edit that deals these stages (first block, blocks), so many on each pipeline rank."""

    def edit(content: Content) -> None:
        content.update(virtual_stages=count, schedule="interleaved_1f1b" if count > 1 else "1f1b")
        content["stages"] = [{"first_block": first, "blocks": blocks} for first, blocks in stages]

    return edit


ILLEGAL: dict[str, tuple[Edit, type[PlannerError], tuple[str, ...]]] = {
    "another graph": (
        put("model", "fingerprint", value="sha256:1234"),
        PlanFileError,
        ("fingerprint sha256:1234", "plan it again"),
    ),
    "unknown factor": (
        put(*BLOCKS, "operators", Q_PROJ, value="b,zz"),
        StrategyError,
        (Q_PROJ, "no factor 'zz'", "splittable factors: b, s, i, o"),
    ),
    "factor that does not divide": (
        put(*BLOCKS, "operators", Q_PROJ, value="b,b"),
        StrategyError,
        (Q_PROJ, "axis0 of size 2 and axis1 of size 8", "extent 4"),
    ),
    "blocked factor": (
        put(*BLOCKS, "operators", ATTENTION, value="b,k"),
        StrategyError,
        (ATTENTION, "factor 'k', which cannot be split"),
    ),
    "too many entries": (
        put(*BLOCKS, "operators", Q_PROJ, value="b,o,-"),
        StrategyError,
        (Q_PROJ, "3 entries", "2 axes"),
    ),
    "too few entries": (put(*BLOCKS, "operators", Q_PROJ, value=""), StrategyError, (Q_PROJ, "0 entries")),
    "unknown operator": (
        put(*BLOCKS, "operators", Q_PROJ + "s", value="-,-"),
        PlanFileError,
        (f"unknown operator '{Q_PROJ}s'", f"did you mean {Q_PROJ}"),
    ),
    "unknown parameter": (
        put(*BLOCKS, "parameters", "layers.0.weight", value={"weight": "R,R", "gradient": "R,R", "state": "R,R"}),
        PlanFileError,
        ("unknown parameter 'layers.0.weight'", "model.layers.0"),
    ),
    "missing operator": (drop(*BLOCKS, "operators", Q_PROJ), PlanFileError, (Q_PROJ, "no strategy", "plan again")),
    "missing parameter": (drop(*BLOCKS, "parameters", WEIGHT), PlanFileError, (WEIGHT, "no stored layouts")),
    "operator of another block": (
        put(*BLOCKS, "operators", Q_PROJ.replace("0", "1"), value="-,-"),
        PlanFileError,
        ("is not in block 0", "names of its first block"),
    ),
    "operator twice": (
        put("groups", 0, "operators", Q_PROJ, value="-,-"),
        PlanFileError,
        (Q_PROJ, "another group", "keep one"),
    ),
    "parameter twice": (
        put("groups", 0, "parameters", WEIGHT, value={"weight": "R,R", "gradient": "R,R", "state": "R,R"}),
        PlanFileError,
        (WEIGHT, "another group", "keep one"),
    ),
    "groups leave blocks out": (
        put(*BLOCKS, "blocks", value=3),
        PlanFileError,
        ("cover the blocks 0 to 3 once each", "they cover 0 to 2"),
    ),
    "groups overlap": (
        lambda content: content["groups"].append({**EMPTY, "name": "again", "first_block": 0, "blocks": 4}),
        PlanFileError,
        ("cover the blocks 0 to 3 once each", "0 to 3, 0 to 3"),
    ),
    "group beyond the end": (put(*BLOCKS, "blocks", value=5), PlanFileError, ("block",)),
    "empty group beyond the end": (
        lambda content: content["groups"].append({**EMPTY, "name": "far", "first_block": 2**31, "blocks": 2**31}),
        PlanFileError,
        ("the model has 4 blocks",),
    ),
    "stages leave blocks out": (put("stages", 0, "blocks", value=3), PlanFileError, ("stages", "3 blocks", "has 4")),
    "stages start late": (
        put("stages", 0, "first_block", value=1),
        PlanFileError,
        ("stages.0", "starts at block 1", "first_block to 0"),
    ),
    "digest": (put("cluster", "digest", value="0" * 64), PlanFileError, ("cluster", "h100-80gb", "plan again")),
    "bandwidth": (put("mesh", 1, "bandwidth", value=1.0), PlanFileError, ("mesh", "axis1", "bandwidth 1")),
    "missing input": (drop("inputs", "args_0"), PlanFileError, ("inputs", "args_0")),
    "unknown input": (put("inputs", "args_2", value="R,R"), PlanFileError, ("unknown input 'args_2'", "args_0")),
    "partial input": (put("inputs", "args_0", value="P,R"), LayoutError, ("inputs['args_0']", "not partial")),
    "input of another rank": (
        put("inputs", "args_0", value="S2,R"),
        LayoutError,
        ("args_0", "S2,R", "does not divide"),
    ),
    "stored layout that does not divide": (
        put(*BLOCKS, "parameters", WEIGHT, value={"weight": "S2,R", "gradient": "S2,R", "state": "S2,R"}),
        LayoutError,
        (WEIGHT, "S2,R", "does not divide"),
    ),
    "partial weight": (
        put(*BLOCKS, "parameters", WEIGHT, value={"weight": "P,R", "gradient": "P,R", "state": "R,R"}),
        StrategyError,
        (WEIGHT, "cannot be partial", "axis 0"),
    ),
    "gradient unlike its weight": (
        put(*BLOCKS, "parameters", WEIGHT, value={"weight": "S0,R", "gradient": "P,R", "state": "S0,R"}),
        StrategyError,
        (WEIGHT, "gradient cut alike"),
    ),
    "gradient unlike its state": (
        put(*BLOCKS, "parameters", WEIGHT, value={"weight": "R,R", "gradient": "S0,R", "state": "R,R"}),
        StrategyError,
        (WEIGHT, "gradient cut as S0 on axis 0", "state cut alike, not R"),
    ),
    "recomputation outside of the blocks": (
        put("groups", 0, "recomputation", value="full"),
        PlanFileError,
        ("group 'before the blocks'", "only blocks are recomputed", "'none'"),
    ),
    "selective without operators": (
        put(*BLOCKS, "recomputation", value="selective"),
        PlanFileError,
        ("group 'blocks 0 to 3'", "keeps no operator", "'full'"),
    ),
    "kept without selective": (
        put(*BLOCKS, "kept", value=[ATTENTION]),
        PlanFileError,
        ("group 'blocks 0 to 3'", ATTENTION, "recomputation 'none'", "takes 'selective'"),
    ),
    "kept operator that is unknown": (
        selective(ATTENTION + "s"),
        PlanFileError,
        ("group 'blocks 0 to 3'", f"unknown operator '{ATTENTION}s'", f"did you mean {ATTENTION}"),
    ),
    "kept operator of another block": (
        selective(ATTENTION.replace("0", "1")),
        PlanFileError,
        ("group 'blocks 0 to 3'", ATTENTION.replace("0", "1"), "not in block 0", "names of its first block"),
    ),
    "kept operator outside of the blocks": (selective("lm_head/linear"), PlanFileError, ("not in block 0",)),
    "kept view": (
        selective(SHARED),
        PlanFileError,
        ("group 'blocks 0 to 3'", SHARED, "cannot be kept", "view", "take it out of kept"),
    ),
    "schedule without virtual stages": (
        put("schedule", value="interleaved_1f1b"),
        PlanFileError,
        ("schedule", "takes virtual_stages = 2 or more, not 1"),
    ),
    "virtual stages of one rank": (
        virtual(2, [(0, 2), (2, 2)]),
        PlanFileError,
        ("schedule: interleaved_1f1b", "2 ranks or more, not pipeline = 1"),
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_is_illegal_is_named(case: str) -> None:
    edit, kind, words = ILLEGAL[case]
    plan = parse_plan(edited(WHOLE, edit))
    with pytest.raises(kind) as caught:
        verdict_of(plan)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def stages_of(*held: int) -> str:
    """The plan with stages that hold so many blocks each."""
    firsts = [sum(held[:number]) for number in range(len(held))]
    stages = [{"first_block": first, "blocks": blocks} for first, blocks in zip(firsts, held, strict=True)]
    return edited("only stages", put("stages", value=stages))


def test_a_stage_without_blocks_is_refused_between_others() -> None:
    plan = plan_named("only stages")
    blocks = verdict_of(plan).bound.blocks
    stages = tuple(Stage(first_block=first, blocks=held) for first, held in ((0, 2), (2, 0), (2, 2)))
    with refusals.refused(PlanFileError, "stages.1", "no block", "only the first and the last may"):
        check_stages(replace(plan, stages=stages), blocks)


@pytest.mark.parametrize("held", [(4, 0), (0, 4)], ids=str)
def test_the_first_and_the_last_stage_may_hold_no_block(held: tuple[int, int]) -> None:
    """Vocabularies that take as long as blocks are stages of their own: such plans are bound, priced and read again."""
    verdict = verdict_of(parse_plan(stages_of(*held)))
    assert verdict.fits
    assert not verdict.as_stated
    assert [stage.blocks for stage in verdict.bound.plan.stages] == list(held)
    assert verdict.prediction.objective_seconds > plan_named("only stages").prediction.objective_seconds


def test_micro_batches_that_are_no_round_of_virtual_stages_are_refused() -> None:
    stages = [(0, 1), (1, 1), (2, 1), (3, 1)]

    def edit(content: Content) -> None:
        virtual(2, stages)(content)
        content["cluster"]["devices"] = 4
        content["training"]["micro_batches"] = 1

    plan = parse_plan(edited("pipeline", edit))
    assert (plan.pipeline, plan.virtual_stages) == (2, 2)
    with refusals.refused(PlanFileError, "training.micro_batches", 1, 2, 8, 2, "virtual_stages = 1"):
        verdict_of(plan)


def version_1(content: Content) -> None:
    """An edit to the form of version 1."""
    content["schema_version"] = 1
    content["recomputation"] = next(g["recomputation"] for g in content["groups"] if g["blocks"])
    del content["virtual_stages"]
    for younger in ("stages", "objective_seconds", "low_seconds", "high_seconds"):
        del content["prediction"][younger]
    for group in content["groups"]:
        del group["recomputation"], group["kept"]


@pytest.mark.parametrize("name", ["two axes", "pipeline", "only stages"])
def test_version_1_is_read(name: str) -> None:
    plan = plan_named(name)
    old = parse_plan(edited(name, version_1))
    seconds = plan.prediction.step_seconds  # had one number for both
    assert old == replace(
        plan,
        prediction=replace(plan.prediction, stages=(), objective_seconds=seconds, low_seconds=None, high_seconds=None),
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("recomputation", value="selective"), ("recomputation", "'selective'", "none, full")),
        (drop("recomputation"), ("recomputation",)),
        (put("cluster", "composition", value="node=2"), ("version 1 has no key 'composition'",)),
        (put("virtual_stages", value=2), ("version 1 has no key 'virtual_stages'", "schema_version 2")),
        (put("groups", 1, "kept", value=[]), ("groups.1", "no key 'kept'")),
        (put("groups", value=7), ("groups",)),
        (put("groups", 0, value=7), ("groups.0",)),
        (put("prediction", value=None), ("prediction",)),
    ],
)
def test_version_1_is_checked_as_version_2_is(edit: Edit, words: tuple[str, ...]) -> None:
    def both(content: Content) -> None:
        version_1(content)
        edit(content)

    message = refused(edited(WHOLE, both))
    assert all(word in message for word in words), message


def test_a_file_that_has_one_number_for_step_and_objective_is_read() -> None:
    plan = plan_named("pipeline")
    assert plan.prediction.objective_seconds > plan.prediction.step_seconds
    old = parse_plan(edited("pipeline", drop("prediction", "objective_seconds")))
    assert old.prediction == replace(plan.prediction, objective_seconds=plan.prediction.step_seconds)
    assert parse_plan(dump_plan(old)) == old


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_failing_write_leaves_everything_as_it_was(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_named("no axes"), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, call, full)
    with refusals.refused(PlanFileError, path, os.strerror(errno.ENOSPC)):
        save_plan(plan_named("pipeline"), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_plan(plan_named("no axes"), tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    for path in (tmp_path, tmp_path / "file" / "plan.json", tmp_path / "a\0b.json", Path("/proc/none/plan.json")):
        with refusals.refused(PlanFileError, path):
            save_plan(plan_named("no axes"), path)
    assert (tmp_path / "file").read_text() == "here first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_saved_plan_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_plan(plan_named("no axes"), tmp_path / "plan.json")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


def test_keys_stand_in_the_documented_order() -> None:
    content = json.loads(dump_plan(plan_named(WHOLE)))
    assert list(content) == [
        "schema_version", "model", "training", "cluster", "mesh", "stages", "virtual_stages", "schedule",
        "inputs", "groups", "prediction", "provenance",
    ]  # fmt: skip


def test_a_file_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    read = tmp_path / "config.json"
    writing.check_place(read, (read, None, "h100"))  # nothing is there yet
    read.write_text("{}")
    (tmp_path / "link.json").symlink_to(read)
    for place in (read, tmp_path / "link.json"):
        with pytest.raises(PlanFileError, match="is read here and would be overwritten; name another file"):
            writing.check_place(place, (None, "h100", read))
    writing.check_place(tmp_path / "other.json", (read,))


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "plan.json"
    kept.parent.mkdir()
    kept.write_text("before")
    link = tmp_path / "plan.json"
    link.symlink_to(kept)
    writing.write_atomically(link, "after")
    assert link.is_symlink()
    assert kept.read_text() == "after"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "plan.json", "plan.json"]


def test_a_device_or_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writing.check_place(pipe)
        writing.write_atomically(pipe, "text")
        assert os.read(reads, 10) == b"text"
    finally:
        os.close(reads)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]
    writing.check_place(Path(os.devnull))
    assert not Path(os.devnull).is_file()


def test_a_dash_is_no_file() -> None:
    with pytest.raises(PlanFileError, match="name a file, or /dev/stdout"):
        writing.check_place(Path("-"))
