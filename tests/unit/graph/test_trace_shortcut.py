"""Alike blocks are traced once: the graph must be that of tracing every block, however the blocks hang together."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.gpt import GPT, GPTConfig
from planner.models.llama import Llama, LlamaConfig

WIDTH = 8
LAYERS = 5


class Block(nn.Module):
    """norm, linear, activation, residual."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return x + self.linear(self.norm(x)).relu()


class Stack(nn.Module):
    """Blocks one after the other; the loss is a mean. Cases below override `run` or change the blocks."""

    def __init__(self, make: Callable[[int], nn.Module] = lambda _: Block(), layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(layers))
        self.register_buffer("scale", torch.ones(WIDTH))

    def run(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).mean()


class Indexed(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2 if self.layer_idx % 2 else super().forward(x)


class Numbered(Block):
    """As modules of transformers: it knows the number of its layer, and does nothing with it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index


class Counting(Indexed):
    """As one that does something else by it."""


class NumberedScaled(Numbered):
    """Of another kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


_THEIRS = ModuleType("transformers.models.of_tests")
sys.modules[_THEIRS.__name__] = _THEIRS
Numbered.__module__ = NumberedScaled.__module__ = Counting.__module__ = _THEIRS.__name__


class Scaled(Block):
    """Multiplies by an attribute: an int and a float of equal value make different graphs."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Optional(Block):
    """What it does depends on the arguments it is given."""

    def forward(self, x: torch.Tensor, index: int = 0, *, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x)
        return (x * index if index else x) + (0 if gate is None else gate)


class Tuple(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor, int]:
        y = super().forward(x)
        return y, None, y.sum(), 3


class Dict(Block):
    def forward(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": super().forward(state["x"]), "kept": state["kept"]}


class Held:
    """A result that torch knows nothing about."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Wrapping(Block):
    def forward(self, x: Any) -> Any:
        return Held(super().forward(x.tensor if isinstance(x, Held) else x))


class Reading(Block):
    """Reads a tensor of its parent without being given it."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read()


class Buffered(Block):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table


class WithConfig(Block):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.config.factor


class Remembering(Block):
    """Leaves something behind in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) * self.seen


class Appending(Block):
    def forward(self, x: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        x = super().forward(x)
        outputs.append(x)
        return x


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(x)


class MadeInPlace(Block):
    """Changes what it made, in whole and in part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        made.unsqueeze(0)[:, :, :2].mul_(2)
        return made.add_(1)


class ChosenInPlace(Block):
    """Changes one of several results of an operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest, _ = super().forward(x).topk(2, dim=-1)
        largest /= largest.sum(-1, keepdim=True)
        return x * largest.sum(-1, keepdim=True)


class GivenPartInPlace(Block):
    """Changes one of the pieces of what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = x.chunk(2, dim=-1)
        first.mul_(2)
        return super().forward(x)


class PartInPlace(Block):
    """Changes a part of what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.unsqueeze(0)[:, :, :2].mul_(2)
        return super().forward(x)


class Weight(Block):
    """Returns a parameter and a buffer that it uses nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x), self.extra, self.offset


class Shared(Block):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(super().forward(x))


class Strided(Block):
    """What a reshape does depends on the strides of the argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, WIDTH)).reshape(x.shape).transpose(0, 0)


class Constant(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor(2.0)


class Routed(Block):
    def route(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 3


class Autocast(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@dataclass
class Config:
    factor: int = 2


@dataclass
class Guarded(Config):
    """As configs of transformers whose layers differ: what differs is refused to whoever reads it of all of them."""

    size: int = 8

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise ValueError("size differs between layers")
        return super().__getattribute__(name)


def stack(
    make: Callable[[int], nn.Module],
    run: Callable[[Any, torch.Tensor], Any] | None = None,
    layers: int = LAYERS,
) -> nn.Module:
    model = Stack(make, layers)
    if run is not None:
        model.run = lambda x: run(model, x)
    return model


def plain(_: int) -> nn.Module:
    return Block()


def loop(call: Callable[[Any, int, Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    def run(model: Any, x: Any) -> Any:
        for index, layer in enumerate(model.layers):
            x = call(model, index, layer, x)
        return x

    return run


def unpack(model: Any, x: torch.Tensor) -> torch.Tensor:
    total = 0
    for layer in model.layers:
        x, nothing, part, three = layer(x)
        assert nothing is None
        total = total + part * three
    return x + total


def collect(model: Any, x: torch.Tensor) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    for layer in model.layers:
        x = layer(x, outputs)
    return torch.stack(outputs)


def skips(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A U-net: each block of the second half adds the result of one of the first half."""
    kept = []
    for index, layer in enumerate(model.layers):
        kept.append(x := layer(x + kept[-2] if index > 2 else x))
    return x


def set_flag(model: Any, index: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.scale = index
    return layer(x)


def set_shared(model: Any, index: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.config["factor"] = index
    return layer(x) * layer.config["factor"]


class FromDict(WithConfig):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, x) * self.config["factor"]


def shared_parent_buffer() -> nn.Module:
    model = Stack()
    model.layers = nn.ModuleList(Reading(lambda: model.scale) for _ in range(LAYERS))
    return model


def parent_in_a_list() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        layer.parent = [model]
        layer.__class__ = ParentReading
    return model


class ParentReading(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.parent[0].scale


def tied_neighbours() -> nn.Module:
    model = Stack()
    for layer in model.layers[1:]:
        layer.linear.weight = model.layers[0].linear.weight
    return model


def tied_to_head() -> nn.Module:
    model = stack(plain, lambda m, x: torch.nn.functional.linear(Stack.run(m, x), m.head))
    model.head = model.layers[2].linear.weight
    return model


def hooked() -> nn.Module:
    model = Stack()
    model.layers[2].register_forward_hook(lambda module, args, result: result * 2)
    return model


def hooked_inside() -> nn.Module:
    model = Stack()
    for index, layer in enumerate(model.layers):
        layer.linear.register_forward_pre_hook(lambda module, args, index=index: (args[0] * index,))
    return model


def own_forward() -> nn.Module:
    model = Stack()
    block = model.layers[3]
    block.forward = lambda x: x * 2
    return model


def nested(count: int = 4) -> nn.Module:
    model = stack(
        lambda _: nn.ModuleList(Block() for _ in range(count)),
        lambda m, x: [x := layer(x) for group in m.layers for layer in group][-1],
    )
    return model


def sequences() -> nn.Module:
    return stack(lambda _: nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.ReLU()))


def root_sequence() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1), nn.AdaptiveAvgPool1d(1), Mean())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def frozen_half() -> nn.Module:
    model = Stack(layers=8)
    for layer in model.layers[:4]:
        layer.requires_grad_(False)
    return model


def two_lists() -> nn.Module:
    model = stack(plain, lambda m, x: m.last(m.tail(Stack.run(m, x))))
    model.tail = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model.last = nn.Linear(WIDTH, 2)
    return model


def previous_block() -> nn.Module:
    model = Stack()
    for before, layer in zip(model.layers, model.layers[1:], strict=False):
        object.__setattr__(layer, "before", before)
        layer.__class__ = LooksBack
    return model


class LooksBack(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.before.linear.bias


def total(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum()


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "alternating": lambda: stack(lambda i: Block() if i % 2 else nn.Linear(WIDTH, WIDTH)),
    "kinds in turn": lambda: stack(lambda i: Scaled(2 + i % 2)),
    "numbered kinds in turn": lambda: stack(lambda i: (Numbered, NumberedScaled)[i % 2](i), layers=10),
    "kinds of other widths": lambda: stack(lambda i: nn.Linear(*((WIDTH, 4) if i % 2 == 0 else (4, WIDTH))), layers=6),
    "last differs": lambda: stack(lambda i: Block() if i < LAYERS - 1 else Scaled(3)),
    "index attribute": lambda: stack(Indexed),
    "int and float attributes": lambda: stack(lambda i: Scaled([1, 1.0, True, 1, 1][i])),
    "zeros of both signs": lambda: stack(lambda i: Scaled(-0.0 if i == 1 else 0.0)),
    "index argument": lambda: stack(lambda i: Optional(), loop(lambda m, i, layer, x: layer(x, i))),
    "keyword on some": lambda: stack(
        lambda i: Optional(), loop(lambda m, i, layer, x: layer(x, gate=m.scale) if i % 2 else layer(x))
    ),
    "keyword on all": lambda: stack(lambda i: Optional(), loop(lambda m, i, layer, x: layer(x, gate=m.scale))),
    "one skipped": lambda: stack(plain, loop(lambda m, i, layer, x: x if i == 2 else layer(x))),
    "first skipped": lambda: stack(plain, loop(lambda m, i, layer, x: x if i == 0 else layer(x))),
    "none called": lambda: stack(plain, lambda m, x: m.layers[0].linear(x)),
    "one called twice": lambda: stack(plain, loop(lambda m, i, layer, x: layer(layer(x)) if i == 1 else layer(x))),
    "backwards": lambda: stack(plain, lambda m, x: [x := layer(x) for layer in reversed(m.layers)][-1]),
    "out of order": lambda: stack(plain, lambda m, x: [x := m.layers[i](x) for i in (0, 2, 4, 1, 3)][-1]),
    "results ignored": lambda: stack(plain, loop(lambda m, i, layer, x: (layer(x), x)[i % 2])),
    "first result ignored": lambda: stack(plain, loop(lambda m, i, layer, x: (layer(x), x)[i == 0])),
    "parts of blocks": lambda: stack(plain, loop(lambda m, i, layer, x: layer(x) + layer.norm(x))),
    "another method": lambda: stack(lambda i: Routed(), loop(lambda m, i, layer, x: layer(layer.route(x)))),
    "forward by hand": lambda: stack(plain, loop(lambda m, i, layer, x: layer.forward(x))),
    "long skips": lambda: stack(plain, skips),
    "work between": lambda: stack(plain, loop(lambda m, i, layer, x: layer(x * i))),
    "dtype changes": lambda: stack(plain, loop(lambda m, i, layer, x: layer(x.double().float() if i % 2 else x))),
    "first called otherwise": lambda: stack(
        lambda i: Strided(), loop(lambda m, i, y, x: y(x.mT.contiguous().mT if i else x)), layers=7
    ),
    "strides change": lambda: stack(
        lambda i: Strided(), loop(lambda m, i, y, x: y(x.mT.contiguous().mT if i == 3 else x))
    ),
    "expanded argument": lambda: stack(lambda i: Strided(), loop(lambda m, i, y, x: y(x[:1].expand(x.shape)))),
    "tied to each other": tied_neighbours,
    "tied to the head": tied_to_head,
    "buffer of the parent": shared_parent_buffer,
    "parent in a list": parent_in_a_list,
    "parameter of another": previous_block,
    "hook on one": hooked,
    "hooks inside": hooked_inside,
    "forward of its own": own_forward,
    "tuples": lambda: stack(lambda i: Tuple(), unpack),
    "dicts": lambda: stack(
        lambda i: Dict(), lambda m, x: loop(lambda m, i, layer, s: layer(s))(m, {"x": x, "kept": x})["x"]
    ),
    "opaque results": lambda: stack(lambda i: Wrapping(), lambda m, x: Stack.run(m, x).tensor),
    "weights returned": lambda: stack(lambda i: Weight(), loop(lambda m, i, layer, x: sum(layer(x)))),
    "weights of one block read": lambda: stack(plain, lambda m, x: Stack.run(m, x) * m.layers[3].linear.bias),
    "weights of all blocks read": lambda: stack(plain, lambda m, x: Stack.run(m, x) + sum(map(total, m.parameters()))),
    "outputs appended": lambda: stack(lambda i: Appending(), collect),
    "in place": lambda: stack(lambda i: InPlace(), loop(lambda m, i, layer, x: layer(x * 1) + x)),
    "in place on a kept value": lambda: stack(
        lambda i: InPlace(), lambda m, x: loop(lambda m, i, y, h: y(h) + h)(m, x + 0)
    ),
    "in place on what was made": lambda: stack(lambda i: MadeInPlace()),
    "in place on one of several results": lambda: stack(lambda i: ChosenInPlace()),
    "in place on a piece": lambda: stack(lambda i: GivenPartInPlace(), loop(lambda m, i, layer, x: layer(x * 1) + x)),
    "in place on a part": lambda: stack(lambda i: PartInPlace(), loop(lambda m, i, layer, x: layer(x * 1) + x)),
    "numbers of layers": lambda: stack(Numbered),
    "numbers that matter": lambda: stack(Counting),
    "counter attribute": lambda: stack(lambda i: Remembering()),
    "flag set by parent": lambda: stack(lambda i: Scaled(7), loop(set_flag)),
    "shared dict set by parent": lambda: stack(lambda i, shared={"factor": 7}: FromDict(shared), loop(set_shared)),
    "dataclass": lambda: stack(lambda i: WithConfig(Config())),
    "dataclass that refuses": lambda: stack(lambda i: WithConfig(Guarded())),
    "dataclasses that differ": lambda: stack(lambda i: WithConfig(Config(factor=2 + i // 3))),
    "plain object": lambda: stack(lambda i: WithConfig(SimpleNamespace(factor=2 + i // 3))),
    "lambda over index": lambda: stack(lambda i: Reading(lambda: i + 1)),
    "buffers": lambda: stack(lambda i: Buffered(torch.ones(WIDTH))),
    "shared buffer": lambda: stack(lambda i, table=torch.ones(WIDTH): Buffered(table)),  # noqa: B008
    "shared activation": lambda: stack(lambda i, part=nn.GELU(): Shared(part)),  # noqa: B008
    "shared linear": lambda: stack(lambda i, part=nn.Linear(WIDTH, WIDTH): Shared(part)),  # noqa: B008
    "constants": lambda: stack(lambda i: Constant()),
    "autocast": lambda: stack(lambda i: Autocast()),
    "checkpoint": lambda: stack(plain, loop(lambda m, i, layer, x: checkpoint(layer, x, use_reentrant=False))),
    "nested lists": nested,
    "sequences of modules": sequences,
    "sequence as root": root_sequence,
    "frozen half": frozen_half,
    "evaluation mode of one": lambda: stack(lambda i: nn.Sequential(Block(), nn.Dropout(0.5)).train(i != 2)),
    "two lists": two_lists,
    "one module many times": lambda: stack(lambda i, part=Block(): part),  # noqa: B008
    "modules of lambdas": lambda: stack(lambda i: Reading(lambda: 2)),
}


def same(short: OperatorGraph, full: OperatorGraph) -> None:
    """Two graphs are equal in everything; operators first, because their difference says most."""
    assert [op.name for op in short.operators] == [op.name for op in full.operators]
    assert short.operators == full.operators
    assert short.types == full.types
    assert short == full
    assert short.fingerprint() == full.fingerprint()


def complete(graph: OperatorGraph) -> None:
    """`types` has what the graph has, and every operand exists before it is used."""
    held = {*graph.inputs, *graph.parameter_names, *graph.buffers}
    assert set(graph.types) == held | set(graph.producer)
    for op in graph.operators:
        assert held.issuperset(op.operands), op
        held.update(name for name in op.results if name is not None)


@pytest.mark.cases(3, 6)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_shortcut_gives_the_graph_of_the_full_trace(case: str) -> None:
    torch.manual_seed(0)
    made = CASES[case]
    inputs = (torch.ones(4, WIDTH),)
    full = trace(made(), inputs, full=True)
    short = trace(made(), inputs)
    same(short, full)
    complete(short)


@pytest.mark.cases(1, 4)
@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_shortcut_on_the_zoo(family: str, layers: int) -> None:
    with torch.device("meta"):
        if family == "llama":
            module: nn.Module = Llama(
                LlamaConfig(
                    num_layers=layers,
                    hidden_size=32,
                    ffn_size=64,
                    num_heads=4,
                    num_kv_heads=2,
                    vocab_size=64,
                    sequence_length=16,
                )
            )
        else:
            module = GPT(GPTConfig(num_layers=layers, hidden_size=32, num_heads=4, vocab_size=64, sequence_length=16))
        tokens = torch.zeros(2, 16, dtype=torch.int64)
    short, full = trace(module, (tokens, tokens)), trace(module, (tokens, tokens), full=True)
    same(short, full)
    complete(short)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("case", "computed"),
    [
        ("plain", 1),
        ("first called otherwise", 2),
        ("index argument", 2 + LAYERS),  # the third block needs parameters that were hidden
        ("keyword on all", 1),
        ("keyword on some", 2),
        ("out of order", 1),
        ("long skips", 1),
        ("tuples", 1),
        ("dicts", 1),
        ("buffers", 1),
        ("dataclass", 1),
        ("dataclass that refuses", LAYERS),
        ("weights returned", 1),
        ("modules of lambdas", 1),
        ("sequences of modules", 1),
        ("nested lists", LAYERS),
        ("two lists", 2),
        ("in place on what was made", 1),
        ("in place on one of several results", 1),
        ("in place on a piece", LAYERS + 1),
        ("kinds in turn", 3),
        ("numbers of layers", 3),
        ("numbered kinds in turn", 6),
        ("frozen half", 2),
    ],
)
def test_alike_blocks_are_computed_once(case: str, computed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(nn.LayerNorm, "forward", counting(nn.LayerNorm.forward, calls))
    trace(CASES[case](), (torch.ones(4, WIDTH),))
    assert len(calls) == computed


def counting(forward: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls.append(None)
        return forward(*args)

    return counted


@pytest.mark.parametrize("case", ["plain", "index argument", "one called twice", "weights of all blocks read"])
def test_the_module_is_left_as_it_was(case: str) -> None:
    module = CASES[case]()
    before = {path: dict(child.__dict__) for path, child in module.named_modules()}
    trace(module, (torch.ones(4, WIDTH),))
    assert {path: dict(child.__dict__) for path, child in module.named_modules()} == before


def test_the_module_is_left_as_it_was_after_an_error() -> None:
    def fails(model: Any, x: torch.Tensor) -> torch.Tensor:
        return Stack.run(model, x) @ torch.ones(3, 3)

    module = stack(plain, fails)
    with pytest.raises(Exception, match="must have same reduction dim"):
        trace(module, (torch.ones(4, WIDTH),))
    assert not any("forward" in child.__dict__ for child in module.modules())
    assert not hasattr(torch.ops.planner_trace, "call")


class TwoLists(Stack):
    """As models that see: one list of blocks is called before the other."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.others = nn.ModuleList(make(i) for i in range(LAYERS))

    def run(self, x: torch.Tensor) -> Any:
        for layer in self.others:
            x = layer(x)
        return super().run(x)


def test_a_list_of_blocks_that_differ_leaves_another_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    once, every = (trace(TwoLists(lambda _: Remembering()), (torch.ones(4, WIDTH),), full=full) for full in (0, 1))
    assert once.fingerprint() == every.fingerprint()
    monkeypatch.setattr(nn.LayerNorm, "forward", counting(nn.LayerNorm.forward, calls := []))
    trace(TwoLists(lambda _: Remembering()), (torch.ones(4, WIDTH),))
    assert len(calls) == 1 + LAYERS + 1  # the first of the others changes itself


class Cached(Block):
    def forward(self, x: torch.Tensor, cache: Held | None = None) -> torch.Tensor:
        return super().forward(x)


class CachingConfig:
    """As one of transformers."""

    def __init__(self) -> None:
        self.use_cache = True


CachingConfig.__module__ = _THEIRS.__name__


def test_caches_of_transformers_are_off_while_a_model_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any, x: torch.Tensor) -> Any:
        for layer in model.layers:
            x = layer(x, Held(x) if model.config.use_cache else None)
        return x

    module = stack(lambda _: Cached(), run)
    module.config = CachingConfig()
    monkeypatch.setattr(nn.LayerNorm, "forward", counting(nn.LayerNorm.forward, calls := []))
    trace(module, (torch.ones(4, WIDTH),))
    assert len(calls) == 1
    assert module.config.use_cache
