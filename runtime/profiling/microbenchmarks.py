"""The cases that are timed to measure a machine: one call of every class of kernels, forward and backward.

A case says how to make its inputs and what to call. It counts FLOP, bytes and kernels as a plan's pricing does for that
kind of operator. Sums and concatenations have no backward case: autograd copies nothing there.

    products         x W' as a linear layer computes it, and the two products of its backward pass
    attention        causal, on transposed views, as models have them
    copy             a transposed view made contiguous; a gradient added to the accumulated one
    elementwise      one and two operands, a concatenation
    normalisation    RMS norm, layer norm, softmax
    cross_entropy, embedding, optimizer

Extents on a CPU are those of small models, on an accelerator those of large ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from costmodels import AttentionShape, optimizer_traffic
from hardware_profiles import KernelRow
from planner.plan.plan import PRECISIONS
from runtime.optimizers.optimizers import OptimizerSettings, has_one_kernel, make_optimizer
from runtime.profiling.launched_kernels import LaunchedKernels

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, tensor) for name, tensor in PRECISIONS.items()}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call to be timed: `prepare` makes the inputs and returns the call."""

    label: str
    dtype: str
    row: Callable[[float], KernelRow]
    prepare: Callable[[], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """The sizes of the cases."""

    products: tuple[tuple[int, int, int], ...]  # m, n, k
    slow_products: tuple[tuple[int, int, int], ...]  # for a dtype without a fast path
    attention: tuple[tuple[int, int, int, int, int], ...]  # batch, heads, key heads, sequence, head_dim
    elements: tuple[int, ...]
    width: int  # of rows
    vocabularies: tuple[tuple[int, int], ...]  # tokens, vocabulary
    updates: tuple[int, ...]  # parameters of each tensor in an update


_CPU = Extents(
    products=(
        (16, 128, 128), (64, 256, 256), (128, 512, 512), (256, 256, 256), (256, 256, 1024), (256, 1024, 256),
        (512, 128, 512), (512, 512, 512), (512, 1408, 512), (512, 512, 1408), (1024, 512, 256), (1024, 1024, 1024),
    ),
    slow_products=((16, 64, 64), (32, 128, 128), (64, 128, 128), (128, 128, 128), (64, 64, 256), (64, 256, 64)),
    attention=((1, 2, 2, 64, 32), (2, 4, 2, 128, 32), (2, 8, 4, 128, 64), (4, 4, 4, 256, 64), (2, 4, 4, 512, 64),
               (1, 8, 8, 512, 32)),
    elements=(2**9, 2**14, 2**16, 2**17, 2**18, 2**19, 2**20),
    width=512,
    vocabularies=((128, 1024), (256, 4096), (512, 8192)),
    updates=(2**12, 2**16, 2**20),
)  # fmt: skip
_ACCELERATOR = Extents(
    products=(
        (128, 1024, 1024), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 4096), (4096, 4096, 1024),
        (4096, 4096, 4096), (8192, 1024, 8192), (8192, 8192, 1024), (8192, 3584, 8192), (4096, 14336, 4096),
        (8192, 8192, 8192), (4096, 4096, 14336),
    ),
    slow_products=((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (4096, 1024, 4096),
                   (4096, 4096, 1024)),
    attention=((1, 8, 8, 1024, 128), (2, 8, 8, 2048, 128), (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128),
               (4, 16, 16, 2048, 64), (1, 8, 2, 8192, 128)),
    elements=(2**12, 2**20, 2**22, 2**24, 2**26, 2**28),
    width=4096,
    vocabularies=((2048, 16384), (4096, 32768), (4096, 131072)),
    updates=(2**14, 2**20, 2**24),
)  # fmt: skip


def cases(device: torch.device, every: int) -> Iterator[Case]:
    """Every case for a device, or about one in `every` of them."""
    extents = _CPU if device.type == "cpu" else _ACCELERATOR
    for dtype in DTYPES:
        slow = dtype == ("fp16" if device.type == "cpu" else "fp32")
        for index, (m, n, k) in enumerate(extents.slow_products if slow else extents.products):
            if every <= 2 or index < 3:
                yield from _products(m, n, k, dtype, device, only=index % 3 if every > 1 or slow else None)
        if not (slow and device.type == "cpu"):
            for shape in extents.attention if every <= 2 else extents.attention[:1]:
                yield from _attention(shape, dtype, device)
    main = "fp32" if device.type == "cpu" else "bf16"
    for elements in sorted({*extents.elements[:2], *extents.elements[::every]}):
        yield from _memory_bound(elements, extents.width, main, device)
    for tokens, vocabulary in extents.vocabularies[::every]:
        yield from _vocabulary(tokens, vocabulary, extents.width, device)
    for parameters in extents.updates if every <= 2 else extents.updates[:2]:
        yield _update(parameters, device)


def _case(
    op_class: str,
    call: str,
    direction: str,
    dtype: str,
    prepare: Callable[[], Call],
    *,
    flops: float = 0.0,
    moved: float = 0.0,
    kernels: int = 1,
    extents: tuple[int, ...] = (),
) -> Case:
    def row(seconds: float) -> KernelRow:
        return KernelRow(
            op_class=op_class,
            call=call,
            direction="forward" if direction == "forward" else "backward",
            dtype=dtype,
            extents=extents,
            flops=flops,
            bytes_moved=moved,
            kernels=kernels,
            seconds=seconds,
        )

    return Case(label=f"{op_class}: {call} {direction} {dtype}", dtype=dtype, row=row, prepare=prepare)


def _products(m: int, n: int, k: int, dtype: str, device: torch.device, only: int | None) -> Iterator[Case]:
    """A linear layer on m rows, and the two products of its backward pass; or one of the three."""
    kind = DTYPES[dtype]

    def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = ((m, k), (n, k), (m, n))
        one, two, three = (torch.randn(*size, device=device).to(kind) for size in sizes)
        return one, two, three

    def forward() -> Call:
        x, weight, _ = tensors()
        return lambda: F.linear(x, weight)

    def to_input() -> Call:
        _, weight, gradient = tensors()
        return lambda: torch.mm(gradient, weight)

    def to_weight() -> Call:
        x, _, gradient = tensors()
        return lambda: torch.mm(gradient.t(), x)

    passes = (
        ("linear", "forward", forward, (m, n, k)),
        ("to input", "backward", to_input, (m, k, n)),
        ("to weight", "backward", to_weight, (n, k, m)),
    )
    for index, (call, direction, prepare, extents) in enumerate(passes):
        if only is None or index == only:
            moved = (m * n + n * k + m * k) * kind.itemsize
            yield _case("matmul", call, direction, dtype, prepare, flops=2.0 * m * n * k, moved=moved, extents=extents)


def _attention(shape: tuple[int, int, int, int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    batch, heads, key_heads, sequence, width = shape
    kind = DTYPES[dtype]
    extents = (batch, heads, key_heads, sequence, sequence, width)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)

    def tensors() -> list[torch.Tensor]:
        return [
            torch.randn(batch, sequence, count, width, device=device).to(kind).transpose(1, 2).requires_grad_()
            for count in (heads, key_heads, key_heads)
        ]

    one = AttentionShape(
        batch=batch, heads=heads, key_heads=key_heads, queries=sequence, keys=sequence, head_dim=width,
        value_dim=width, causal=True,
    )  # fmt: skip
    flops, moved = float(one.flops), float(one.elements) * kind.itemsize
    yield _case(
        "attention", "causal", "forward", dtype, _forward(call, tensors), flops=flops, moved=moved, extents=extents
    )
    yield _case(
        "attention", "causal", "backward", dtype, _backward(call, tensors),
        flops=2.5 * flops, moved=2 * moved, kernels=3, extents=extents,
    )  # fmt: skip


def _forward(call: Callable[..., torch.Tensor], tensors: Callable[[], list[torch.Tensor]]) -> Callable[[], Call]:
    def prepare() -> Call:
        given = tensors()
        return lambda: call(*given)

    return prepare


def _backward(call: Callable[..., torch.Tensor], tensors: Callable[[], list[torch.Tensor]]) -> Callable[[], Call]:
    """Gradients of everything that requires one, from a kept result."""

    def prepare() -> Call:
        given = tensors()
        result = call(*given)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        incoming = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, wanted, incoming, retain_graph=True)

    return prepare


def _memory_bound(elements: int, width: int, dtype: str, device: torch.device) -> Iterator[Case]:
    """Copies, elementwise operators and norms on (elements / width, width)."""
    kind = DTYPES[dtype]
    rows, size = elements // width, elements * kind.itemsize

    def tensors(count: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: [torch.randn(rows, width, device=device).to(kind).requires_grad_() for _ in range(count)]

    def with_weight() -> list[torch.Tensor]:
        return [*tensors(1)(), torch.ones(width, device=device, dtype=kind, requires_grad=True)]

    def transposed() -> Call:
        given = torch.randn(width, rows, device=device).to(kind).t()
        return lambda: given.contiguous() if rows > 1 else given.clone()

    def accumulated() -> Call:
        total, gradient = torch.zeros(rows, width, device=device), torch.randn(rows, width, device=device).to(kind)
        return lambda: total.add_(gradient)

    yield _case("copy", "transposed", "forward", dtype, transposed, moved=2 * size)
    yield _case("copy", "accumulate", "forward", dtype, accumulated, moved=size + 8 * elements)
    for op_class, name, call, inputs, both in (
        ("elementwise", "silu", F.silu, tensors(1), True),
        ("elementwise", "multiply", torch.mul, tensors(2), True),
        ("elementwise", "add", torch.add, tensors(2), False),
        ("elementwise", "concatenate", lambda x, y: torch.cat((x, y), -1), tensors(2), False),
        ("normalisation", "rms_norm", lambda x, w: F.rms_norm(x, (width,), w), with_weight, True),
        ("normalisation", "layer_norm", lambda x, w: F.layer_norm(x, (width,), w), with_weight, True),
        ("normalisation", "softmax", lambda x: F.softmax(x, -1), tensors(1), True),
    ):
        operands = 2 if name in ("multiply", "add", "concatenate") else 1
        written = 2 if name == "concatenate" else 1
        graded = 2 if name.endswith("_norm") else operands
        moved = (operands + written) * size
        yield _case(op_class, name, "forward", dtype, _forward(call, inputs), moved=moved)
        if both:
            moved += operands * size
            yield _case(op_class, name, "backward", dtype, _backward(call, inputs), moved=moved, kernels=graded)


def _vocabulary(tokens: int, vocabulary: int, width: int, device: torch.device) -> Iterator[Case]:
    """Embedding look-up, and the loss."""

    def labels() -> torch.Tensor:
        return torch.randint(vocabulary, (tokens,), device=device)

    def logits() -> list[torch.Tensor]:
        return [torch.randn(tokens, vocabulary, device=device, requires_grad=True), labels()]

    def table() -> list[torch.Tensor]:
        return [labels(), torch.randn(vocabulary, width, device=device, requires_grad=True)]

    size, rows = 4.0 * tokens * vocabulary, 4.0 * tokens * width
    for op_class, name, call, inputs, forward, backward in (
        ("cross_entropy", "mean", F.cross_entropy, logits, size, 2 * size),
        ("embedding", "rows", F.embedding, table, 2 * rows, rows + 4.0 * vocabulary * width),
    ):
        indices = 8.0 * tokens
        yield _case(op_class, name, "forward", "fp32", _forward(call, inputs), moved=forward + indices)
        yield _case(op_class, name, "backward", "fp32", _backward(call, inputs), moved=backward + indices)


_BLOCKS = 24  # of a model, so that blocks follow each other as in a step
_WIDTH, _HEADS, _TOKENS = 16, 2, 4  # so small that kernels are shorter than their launches


class _Block(torch.nn.Module):
    """A transformer block, written with modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv, self.o = torch.nn.Linear(_WIDTH, 3 * _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).view(1, _TOKENS, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        made: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return made


def small_model(device: torch.device) -> tuple[Call, int]:
    """A call that runs both passes of a hand-written model on almost no data, and the number of kernels that it
    launches."""
    kind = DTYPES["fp32" if device.type == "cpu" else "bf16"]
    model = torch.nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(device, kind)
    given = torch.randn(1, _TOKENS, _WIDTH, device=device).to(kind)

    def call() -> None:
        model.zero_grad()
        model(given).sum().backward()

    with LaunchedKernels() as kernels:
        call()
    return call, kernels.found.total()


_TENSORS = 8  # of one update


def _update(parameters: int, device: torch.device) -> Case:
    def prepare() -> Call:
        weights = [torch.randn(parameters, device=device) for _ in range(_TENSORS)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        return make_optimizer("adamw", weights, OptimizerSettings()).step

    moved = _TENSORS * parameters * optimizer_traffic("fp32", "adamw")
    kernels = 2 if has_one_kernel("adamw", device.type) else _TENSORS  # one kernel counts the updates
    return _case("optimizer", "adamw", "forward", "fp32", prepare, moved=moved, kernels=kernels)
