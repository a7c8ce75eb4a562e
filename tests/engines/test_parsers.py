"""What is exported is taken by the parsers of the engines themselves, in the sense that it was written in.

Each test is skipped where its engine is not installed: `make engines` installs what pip has of them, without what they
depend on. Megatron-LM's arguments are in no wheel; `MEGATRON_LM` names a folder with its sources.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.export.description import Description
from planner.export.files.arguments import options_in
from planner.export.targets import TARGETS
from planner.graph.fp8 import Fp8
from planner.plan.layout.kept import Kept
from tests.engines.exported import PROBLEMS, told, written
from tests.engines.stubs import without_kernels
from tests.unit.export.descriptions import MODELS, descriptions
from tests.unit.export.test_targets import arguments_in, possible


def of(engine: str, case: str) -> tuple[str, Description]:
    """A known problem as an engine is told it."""
    model, description = PROBLEMS[case]
    found = told(engine, description)
    assert found is not None
    return model, found


def cases(engine: str) -> pytest.MarkDecorator:
    """The known problems that an engine has a place for."""
    names = [
        name
        for name, (model, d) in PROBLEMS.items()
        if (found := told(engine, d)) is not None and possible(engine, model, found)
    ]
    return pytest.mark.parametrize("case", names)


def package(name: str, module: str) -> Any:
    """A module of an engine; the test is skipped where it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; make engines installs it")
    without_kernels()
    return importlib.import_module(module)


@cases("accelerate")
def test_accelerate_takes_its_file(case: str, tmp_path: Path) -> None:
    launch = package("accelerate", "accelerate.commands.launch")
    model, d = of("accelerate", case)
    folder = written("accelerate", model, d, tmp_path)
    parser = launch.launch_command_parser()
    args, defaults, _ = launch._validate_launch_command(
        parser.parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    )
    assert (args.num_processes, args.num_machines) == (d.devices, max(1, d.devices // 8))
    assert args.use_fsdp == (d.zero > 0)
    if d.zero:
        assert int(args.fsdp_version) == 2
        assert args.fsdp_reshard_after_forward is (d.zero == 3)
        assert args.fsdp_activation_checkpointing is any(d.full)
        sizes = [
            int(getattr(args, f"parallelism_config_{name}_size")) for name in ("dp_replicate", "dp_shard", "tp", "cp")
        ]
        assert sizes == [d.replicas, d.data // d.replicas, d.tensor, d.context]
        environment = importlib.import_module("accelerate.utils.launch").prepare_multi_gpu_env(args)
        assert environment["FSDP_VERSION"] == "2"
    assert defaults.mixed_precision == "bf16"


class Groups:
    """What DeepSpeed asks for the number of data parallel devices."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


@cases("deepspeed")
def test_deepspeed_takes_its_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = package("deepspeed", "deepspeed.runtime.config")
    model, d = of("deepspeed", case)
    folder = written("deepspeed", model, d, tmp_path)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: d.devices)
    groups = None if d.tensor > 1 else Groups(d.data)  # AutoTP makes its groups later
    found = config.DeepSpeedConfig(str(folder / "ds_config.json"), mpu=groups)
    assert found.train_batch_size == d.global_batch * d.tensor
    assert found.train_micro_batch_size_per_gpu == d.micro_batch
    assert found.gradient_accumulation_steps == d.micro_batches
    assert found.zero_optimization_stage == d.zero
    assert found.bfloat16_config.enabled
    assert found.tensor_parallel_config.autotp_size == (d.tensor if d.tensor > 1 else 0)
    assert found.pipeline["stages"] == (d.pipeline if d.pipeline > 1 else "auto")
    experts = found.expert_parallel_config
    assert (experts.autoep_size if experts.enabled else 1) == (d.expert or 1)
    checks = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    sizes = {"world_size": d.devices, "pp_size": d.pipeline, "tp_size": d.tensor, "sp_size": d.context}
    checks.validate_autoep_config(experts, **sizes, zero_stage=d.zero)


def torchtitan_reads(folder: Path) -> Any:
    manager = package("torchtitan", "torchtitan.config.manager")
    if not hasattr(importlib.import_module("torchtitan.config"), "JobConfig"):
        pytest.skip("this torchtitan reads no TOML; make engines installs 0.2.2")
    return manager.ConfigManager().parse_args([f"--job.config_file={folder / 'train.toml'}"])


@cases("torchtitan")
def test_torchtitan_takes_its_file(case: str, tmp_path: Path) -> None:
    package("torchtitan", "torchtitan.config")
    model, d = of("torchtitan", case)
    check_torchtitan(torchtitan_reads(written("torchtitan", model, d, tmp_path)), d)


def check_torchtitan(found: Any, d: Description) -> None:
    """Its own check of degrees passes, and they are those of the plan."""
    p = found.parallelism
    dims = importlib.import_module("torchtitan.distributed.parallel_dims").ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=d.devices,
    )
    assert (dims.tp, dims.pp, dims.cp) == (d.tensor, d.pipeline, d.context)
    assert found.training.local_batch_size * d.data in (d.micro_batch * d.data, d.global_batch)
    assert found.training.global_batch_size == d.global_batch
    assert found.activation_checkpoint.mode == ("selective" if _part(d) else "full" if any(d.full) else "none")
    if d.pipeline > 1:
        names = [name for part in p.module_fqns_per_model_part for name in part if name.startswith("layers.")]
        assert names == [f"layers.{at}" for at in range(sum(d.layers))]


REGISTRY = """
import json, sys
from tests.engines.stubs import without_kernels

without_kernels()
from torchtitan.config.manager import ConfigManager

found = {}
for name in sys.argv[1:]:
    config = ConfigManager().parse_args(["--module", name, "--config", "plan_config"])
    t, p = config.training, config.parallelism
    found[name] = [
        [t.local_batch_size, t.global_batch_size, t.seq_len, p.pipeline_parallel_microbatch_size],
        [p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.tensor_parallel_degree],
        [p.pipeline_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_schedule],
        sum(name.startswith("layers.") for part in p.module_fqns_per_model_part or () for name in part),
    ]
print("FOUND " + json.dumps(found))
"""
"""What a later torchtitan makes of modules, in a process of its own: 0.2.2 has the same name."""


def test_torchtitan_after_0_2_takes_its_configurations(tmp_path: Path) -> None:
    folder = os.environ.get("TORCHTITAN_LATER", "")
    if not (Path(folder) / "torchtitan").is_dir():
        pytest.skip("no later torchtitan; TORCHTITAN_LATER names the folder that it is installed in")
    known: dict[str, Description] = {}
    for model, problem in PROBLEMS.values():
        d = told("torchtitan", problem)
        text = "" if d is None else TARGETS["torchtitan"].write(_job(model, d)).get("plan_config.py", "")
        if d is not None and text and "os.environ" not in text:  # of a model that is in its registry
            name = f"plan_{len(known)}"
            (tmp_path / f"{name}.py").write_text(text)
            known[name] = d
    assert len(known) >= 4
    paths = os.pathsep.join((folder, str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", REGISTRY, *known], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    words = {"1f1b": "1F1B", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
    for name, d in known.items():
        batches, outer, inner, layers = found[name]
        local = d.micro_batch * (d.micro_batches if d.pipeline > 1 else 1)
        assert batches == [local, d.global_batch, d.sequence_length, d.micro_batch if d.pipeline > 1 else 1]
        assert outer == [1 if d.zero else d.data, d.data if d.zero else 1, d.tensor]
        assert inner == [d.pipeline, d.context, words[d.schedule]]
        assert layers == (sum(d.layers) if d.pipeline > 1 else 0)


def _part(d: Description) -> bool:
    return any(d.selective) or (any(d.full) and d.full != d.layers)


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """Megatron-LM's arguments, from the folder that MEGATRON_LM names."""
    folder = os.environ.get("MEGATRON_LM", "")
    if not (Path(folder) / "megatron" / "training" / "arguments.py").is_file():
        pytest.skip("no sources of Megatron-LM; MEGATRON_LM names their folder")
    without_kernels()
    sys.path.insert(0, folder)
    yield importlib.import_module("megatron.training.arguments")
    sys.path.remove(folder)


def megatron_parses(megatron: Any, script: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What its parser makes of a script, and its own checks of that, which want to know of processes."""
    monkeypatch.setenv("WORLD_SIZE", str(devices))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name, value in re.findall(r"^export (\w+)=(\S+)$", script, re.MULTILINE):
        monkeypatch.setenv(name, value)
    later = "megatron-fsdp-main-grads-dtype" in Path(megatron.__file__).read_text()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments_in(script, later=later)])
    found = megatron.validate_args(megatron.parse_args())
    _megatron_configures(megatron, found, monkeypatch)
    return found


def _megatron_configures(megatron: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of its model, which has checks of its own, as if Transformer Engine were there."""
    configuration = importlib.import_module("megatron.core.transformer.transformer_config")
    monkeypatch.setattr(configuration, "is_te_min_version", lambda *_: True)
    rotary = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(rotary, "fused_apply_rotary_pos_emb", print)
    name = "core_transformer_config_from_args"  # of arguments.py up to core 0.16
    made = getattr(megatron, name, None) or getattr(importlib.import_module("megatron.training.argument_utils"), name)
    made(found)


@cases("megatron")
def test_megatron_takes_its_arguments(
    megatron: Any, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, d = of("megatron", case)
    script = (written("megatron", model, d, tmp_path) / "launch.sh").read_text()
    found = megatron_parses(megatron, script, d.devices, monkeypatch)
    assert found.data_parallel_size == d.data
    degrees = (found.tensor_model_parallel_size, found.pipeline_model_parallel_size, found.context_parallel_size)
    assert degrees == (d.tensor, d.pipeline, d.context)
    assert (found.micro_batch_size, found.global_batch_size) == (d.micro_batch, d.global_batch)
    assert found.num_layers == sum(d.layers)
    assert found.use_distributed_optimizer == (d.zero > 0)
    assert found.expert_model_parallel_size == (d.expert or 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_megatron_takes_whatever_is_written(model: str, data: st.DataObject, megatron: Any) -> None:
    recipe = data.draw(st.sampled_from((None, "tensorwise", "delayed", "mxfp8")))
    wanted = data.draw(descriptions(model))
    if recipe and wanted.precision == "bf16":
        gathered = data.draw(st.booleans())
        wanted = replace(wanted, fp8=Fp8(recipe=recipe, experts=wanted.expert is not None, gathered=gathered))
    if any(wanted.selective):
        part = data.draw(st.sampled_from(("attention", "normalisation", "mlp")))
        wanted = replace(wanted, kept=Kept(but=(part,)))
    d = told("megatron", wanted)
    if d is None:
        return
    names = ("tensor", "gathers", "reductions", "exchange")
    overlapped = tuple(name for name in names if data.draw(st.booleans()))
    dispatcher = data.draw(st.sampled_from(("", "deepep", "hybridep")))
    job = replace(_job(model, d), overlapped=overlapped, dispatcher=dispatcher)
    script = TARGETS["megatron"].write(job)["launch.sh"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert megatron_parses(megatron, script, d.devices, monkeypatch).data_parallel_size == d.data


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_torchtitan_takes_whatever_is_written(model: str, data: st.DataObject, tmp_path: Path) -> None:
    package("torchtitan", "torchtitan.config")
    wanted = data.draw(descriptions(model).filter(lambda d: possible("torchtitan", model, d)))
    d = told("torchtitan", wanted)
    assert d is not None
    files = TARGETS["torchtitan"].write(_job(model, d))
    (tmp_path / "train.toml").write_text(files["train.toml"])
    check_torchtitan(torchtitan_reads(tmp_path), d)


def _job(model: str, d: Description) -> Any:
    from tests.engines.exported import exported_job

    return exported_job(model, d)


def test_launchers_are_left_out_of_arguments() -> None:
    assert options_in("torchrun --nnodes 1 x.py --swiglu").unread == ("nnodes", "swiglu")
