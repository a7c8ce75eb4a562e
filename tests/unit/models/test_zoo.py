import math
import sys
from pathlib import Path

import pytest
import torch

from planner.api.jobs import traced_model
from planner.errors import ModelError
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import without_data
from planner.models.entry import TRACE_BATCH
from planner.models.parameter_counts import PARAMETER_COUNTS
from planner.models.zoo import ZOO, build_model, parameter_count, with_dimensions
from planner.sharding.rules import rule_of
from runtime.data.datasets import synthetic_batch
from runtime.step.arguments import Arguments
from tests.long_lists import first
from tests.refusals import refused

# Parameters of the released checkpoints: what the metadata of their safetensors files sum to on the model pages of
# Hugging Face (meta-llama, mistralai, google, Qwen, deepseek-ai, openai-community, google-bert, google-t5), tied
# weights once; of models of images what torchvision lists for its weights.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-11b": 11_307_321_344,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "dlrm-kaggle": 540.7e6,
}
# GPT-3 and DLRM were published in round numbers only (Brown et al. 2020, table 2.1; the benchmark scripts of DLRM).
ROUNDED = {
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13.0e9,
    "gpt3-175b": 175.0e9,
    "dlrm-terabyte": 24e9,
}
UNPUBLISHED = {"wide-deep"}
QUICK = (
    "llama3.2-1b", "gemma-2b", "qwen2.5-0.5b", "qwen3-0.6b", "gpt2", "bert-base", "t5-small", "deepseek-v2-lite",
    "vit-b16", "resnet18", "dlrm-kaggle", "wide-deep",
)  # fmt: skip
"""One of each family, which are built by default; all are in the thorough tests."""


@pytest.mark.cases(12, 12)
@pytest.mark.parametrize("name", first(len(QUICK), [*QUICK, *(name for name in ZOO if name not in QUICK)]))
def test_the_listed_parameter_count_is_that_of_the_model(name: str) -> None:
    module = build_model(name, dtype="bfloat16").module
    assert all(parameter.device.type == "meta" for parameter in module.parameters())
    assert parameter_count(name) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_parameter_count_is_the_published_one(name: str) -> None:
    if name in PUBLISHED:
        assert parameter_count(name) == pytest.approx(PUBLISHED[name], rel=1e-3)
    elif name in ROUNDED:
        assert parameter_count(name) == pytest.approx(ROUNDED[name], rel=0.02)
    else:
        assert name in UNPUBLISHED or name.endswith("-tiny")


def test_every_model_has_a_source() -> None:
    assert all(entry.source for entry in ZOO.values())
    assert {*PUBLISHED, *ROUNDED, *UNPUBLISHED, *TINY} == set(ZOO) == set(PARAMETER_COUNTS)


TINY = [name for name in ZOO if name.endswith("-tiny")]


@pytest.mark.cases(8, 2)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_and_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    built = build_model(name, dtype="float32", device="cpu")
    example = Arguments(args=tuple(built.args), kwargs=built.kwargs)
    drawn = synthetic_batch(example.tensors(), batch=built.batch, samples=4, bounds=built.bounds, seed=0, step=0)
    call = example.with_tensors(drawn)
    loss = built.module(*call.args, **call.kwargs)
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in built.module.parameters())


def test_dtype_and_sequence_length() -> None:
    built = build_model("llama-tiny", dtype="bfloat16", sequence_length=16)
    assert built.batch == TRACE_BATCH
    assert [tuple(tensor.shape) for tensor in built.args] == [(TRACE_BATCH, 16)] * 2
    assert {parameter.dtype for parameter in built.module.parameters()} == {torch.bfloat16}
    assert trace(built.module, built.args).types["model.cos"].shape[0] == 16


def test_llama_can_be_longer_than_published_and_gpt_cannot() -> None:
    longer = 2 * ZOO["gpt-tiny"].sequence_length
    assert build_model("llama-tiny", dtype="float32", sequence_length=longer).sequence_length == longer
    with refused(ModelError, "gpt-tiny", ZOO["gpt-tiny"].sequence_length, f"--seq-len {longer}"):
        build_model("gpt-tiny", dtype="float32", sequence_length=longer)


@pytest.mark.parametrize("length", [0, -1])
def test_sequence_of_nothing(length: int) -> None:
    with refused(ModelError, f"--seq-len {length}"):
        build_model("llama-tiny", dtype="float32", sequence_length=length)


@pytest.mark.parametrize("name", ["vit-b16", "resnet50", "dlrm-kaggle", "wide-deep"])
def test_models_without_sequences_refuse_a_length(name: str) -> None:
    assert build_model(name, dtype="bfloat16").sequence_length is None
    with refused(ModelError, "--seq-len 64", name):
        build_model(name, dtype="bfloat16", sequence_length=64)


def test_every_input_has_a_bound_of_its_own() -> None:
    built = build_model("dlrm-tiny", dtype="bfloat16", device="cpu")
    assert built.bounds == (None, 64, 32, 16, 2)
    examples = Arguments(args=tuple(built.args), kwargs=built.kwargs).tensors()
    assert examples[0].dtype == torch.bfloat16
    drawn = synthetic_batch(examples, batch=built.batch, samples=500, bounds=built.bounds, seed=0, step=0)
    assert [int(tensor.max()) for tensor in drawn[1:]] == [63, 31, 15, 1]


# Multiply-adds for one image in convolutions and linear layers, as published (He et al. 2016, table 1, counts the
# stride of v1) and as counted for the released weights with the stride in the 3 x 3 convolution.
@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "products"), first(1, [("resnet18", 1.814e9), ("resnet50", 4.089e9), ("resnet152", 11.514e9)])
)
def test_work_of_residual_networks_is_the_known_one(name: str, products: float) -> None:
    built = build_model(name, dtype="bfloat16")
    graph = trace(built.module, built.args)
    rules = [rule_of(graph, op) for op in graph.operators]
    work = [term for rule in rules if rule.op_class == "matmul" for term in rule.work]
    extents = [rule.factors for rule in rules if rule.op_class == "matmul"]
    flops = sum(
        term.coefficient * math.prod(factors[f].extent for f in term.factors)
        for term, factors in zip(work, extents, strict=True)
    )
    assert flops / 2 / built.batch == pytest.approx(products, rel=1e-3)


def test_unknown_model_names_the_nearest() -> None:
    with refused(ModelError, "lama8b", "llama8b", "--model package.module:factory"):
        build_model("lama8b", dtype="float32")


def test_variant_of_an_entry() -> None:
    entry = with_dimensions(ZOO["llama-tiny"], num_layers=6)
    assert dict(entry.dimensions)["num_layers"] == 6
    assert dict(entry.dimensions)["hidden_size"] == dict(ZOO["llama-tiny"].dimensions)["hidden_size"]


FACTORIES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, weight=1.0):
        return (self.linear(x) * weight).mean()


def good():
    return Net(), (torch.ones(6, 4),)


def with_keywords():
    return Net(), [torch.ones(6, 4)], {"weight": 2.0}


def raises():
    raise RuntimeError("no such file")


class Turned(torch.nn.Module):
    def __init__(self, rates):
        super().__init__()
        self.rates = rates
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))

    def forward(self, x):
        turned = torch.view_as_complex(self.linear(x).float().view(6, 2, 2)) * self.turns
        return torch.view_as_real(turned).mean() * sum(self.rates)


def reads_numbers():
    return Turned([rate.item() for rate in torch.linspace(0, 0.3, 3)]), (torch.ones(6, 4),)


def reads_a_weight():
    net = Net()
    net.most = net.linear.weight.abs().max().item()
    return net, (torch.ones(6, 4),)


def lacks_metadata():
    raise FileNotFoundError("no such file: metadata.json")


def keeps_a_tensor():
    net = Net()
    net.register_buffer("most", net.linear.weight.detach().abs().max())
    return net, (torch.ones(6, 4),)


def bare():
    return Net()


def not_a_module():
    return "net", (torch.ones(6, 4),)


def args_are_a_tensor():
    return Net(), torch.ones(6, 4)


def keywords_are_a_list():
    return Net(), (torch.ones(6, 4),), [1]


def no_tensor():
    return Net(), (3,)


NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of factories; the import system forgets it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "zoo_test_nets.py").write_text(FACTORIES)
    (tmp_path / "zoo_test_broken.py").write_text("import torch\ndef (")
    (tmp_path / "zoo_test_missing.py").write_text("import no_such_package_anywhere")
    (tmp_path / "zoo_test_failing.py").write_text("1 / 0")
    for name in [name for name in sys.modules if name.startswith("zoo_test_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_factory_in_the_current_folder() -> None:
    built = build_model("zoo_test_nets:good", dtype="bfloat16")
    assert built.batch == 6
    assert built.sequence_length is None
    assert built.module.linear.weight.dtype == torch.bfloat16
    assert built.module.linear.weight.device.type == "meta"
    graph = trace(built.module, built.args, built.kwargs)
    assert [op.op for op in graph.operators] == ["aten.linear.default", "aten.mul.Tensor", "aten.mean.default"]
    assert graph.types[graph.inputs[0]].dtype == "bfloat16"


@pytest.mark.usefixtures("folder")
def test_a_factory_that_reads_numbers_builds_on_the_host() -> None:
    built = build_model("zoo_test_nets:reads_numbers", dtype="bfloat16")
    assert built.module.rates == pytest.approx([0.0, 0.15, 0.3])
    assert built.module.linear.weight.is_meta
    assert built.module.linear.weight.dtype == torch.bfloat16
    assert without_data(built.module, on_host=built.on_host).turns.is_meta
    assert built.module.turns.dtype == torch.complex64  # and not its real part alone
    assert traced_model(built).loss


def test_a_factory_that_goes_to_another_folder_leaves_the_command_where_it_was(folder: Path) -> None:
    (folder / "zoo_test_going.py").write_text(
        "import os\nfrom zoo_test_nets import good as built\n\n\ndef good():\n    os.chdir('/')\n    return built()\n"
    )
    assert build_model("zoo_test_going:good", dtype="float32").batch == 6
    assert Path.cwd() == folder


@pytest.mark.usefixtures("folder")
def test_what_a_refused_factory_is_told_to_do_works() -> None:
    assert build_model("zoo_test_nets:keeps_a_tensor", dtype="float32").module.most.is_meta


@pytest.mark.usefixtures("folder")
def test_another_error_of_a_factory_is_told_without_that_remedy() -> None:
    with pytest.raises(ModelError, match=r"no such file: metadata\.json$"):
        build_model("zoo_test_nets:lacks_metadata", dtype="float32")


@pytest.mark.usefixtures("folder")
def test_factory_with_keywords() -> None:
    built = build_model("zoo_test_nets:with_keywords", dtype="float32", device="cpu")
    assert built.kwargs == {"weight": 2.0}
    assert isinstance(built.args, tuple)
    assert built.module(*built.args, **built.kwargs).shape == ()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("reference", "facts"),
    [
        ("zoo_test_absent:good", ("--model zoo_test_absent:good", "ModuleNotFoundError")),
        ("zoo_test_missing:good", ("--model zoo_test_missing:good", "no_such_package_anywhere")),
        ("zoo_test_broken:good", ("--model zoo_test_broken:good", "SyntaxError")),
        ("zoo_test_failing:good", ("--model zoo_test_failing:good", "ZeroDivisionError")),
        (":good", ("--model :good", "''")),
        ("zoo_test_nets:goood", ("zoo_test_nets", "goood", "good")),
        ("zoo_test_nets:", ("zoo_test_nets", "''", "good")),
        ("zoo_test_nets:NUMBER", ("zoo_test_nets", "NUMBER", "good")),
        ("zoo_test_nets:raises", ("zoo_test_nets:raises", "RuntimeError", "no such file")),
        (
            "zoo_test_nets:reads_a_weight",
            ("zoo_test_nets:reads_a_weight", "weights have no data", "self.register_buffer"),
        ),
        ("zoo_test_nets:bare", ("zoo_test_nets:bare", "(module, args)", "(module, args, kwargs)", "Net")),
        ("zoo_test_nets:not_a_module", ("zoo_test_nets:not_a_module", "(str, tuple)")),
        ("zoo_test_nets:args_are_a_tensor", ("zoo_test_nets:args_are_a_tensor", "(Net, Tensor)")),
        ("zoo_test_nets:keywords_are_a_list", ("zoo_test_nets:keywords_are_a_list", "(Net, tuple, list)")),
        ("zoo_test_nets:no_tensor", ("zoo_test_nets:no_tensor",)),
    ],
)
def test_bad_factory(reference: str, facts: tuple[object, ...]) -> None:
    with refused(ModelError, *facts):
        build_model(reference, dtype="float32")


@pytest.mark.usefixtures("folder")
def test_sequence_length_does_not_apply_to_a_factory() -> None:
    with refused(ModelError, "--seq-len", "zoo_test_nets:good"):
        build_model("zoo_test_nets:good", dtype="float32", sequence_length=8)
