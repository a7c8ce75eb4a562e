"""Sizes that are values of tensors which the code makes itself, as those of images that are packed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import StackedSamples
from planner.errors import ModelError
from planner.graph.trace import trace
from planner.graph.tracing import marked
from planner.graph.tracing.examples import with_samples
from planner.sharding.discover import discover
from planner.sharding.fixed_batch import batch_fault
from tests.distributed.brought import BATCH, images
from tests.refusals import refused


@pytest.mark.thorough
@pytest.mark.slow
def test_packed_images_are_samples() -> None:
    module, _, inputs = images()
    graph = discover(trace(module, (), inputs))
    called = [op.op for op in graph.operators]
    attended = [op for op in graph.operators if op.op == "aten.scaled_dot_product_attention.default"]
    shapes = [graph.types[op.operands[0]].shape for op in attended]
    assert shapes == 2 * [(BATCH, 4, 8, 8), (BATCH, 4, 4, 8)]  # for each of the sizes, over all samples
    assert called.count("aten.index_select.default") == 2
    assert called.count("planner.marked_ranks.default") == 2
    assert "aten.masked_scatter.default" not in called
    kept = {tuple(value.shape) for value in graph.constants.values()}
    assert kept == {(12,), (12, 1)}  # of one sample
    assert batch_fault(graph, BATCH, lambda n: trace(module, (), with_samples(inputs, BATCH, n))) is None


@pytest.mark.thorough
def test_blocks_that_are_given_known_values_are_traced_once() -> None:
    module, _, inputs = images()
    module.model.blocks.extend(type(module.model.blocks[0])() for _ in range(3))
    once, every = trace(module, (), inputs), trace(module, (), inputs, full=True)
    assert once.fingerprint() == every.fingerprint()


class _Asks(nn.Module):
    def __init__(self, lengths: tuple[int, ...] = (2, 3)) -> None:
        super().__init__()
        self.linear, self.lengths = nn.Linear(4, 4), lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, device=x.device)
        if lengths.max() > 2:
            x = x.sin()
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
        known = torch.zeros(len(ids), dtype=torch.long, device=x.device)
        for number, length in enumerate(lengths.tolist()):
            known[number * length : (number + 1) * length] = number
        seen = ids[ids == lengths.argmax()]
        return (self.linear(x)[:, ids.long()[: len(seen)]] * known[: len(seen)]).mean() + len(torch.unique(known))


def test_code_that_asks_is_answered() -> None:
    x = torch.randn(2, 4)
    graph = trace(_Asks(), (x,))
    assert "aten.sin.default" in {op.op for op in graph.operators}
    graph = trace(_Asks((1, 2)), (x,))
    assert "aten.sin.default" not in {op.op for op in graph.operators}


class _Data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        known = torch.tensor([1, 1], device=x.device)
        known[:] = lengths  # what it was is lost
        return sum((each.mean() for each in torch.split(self.linear(x), known.tolist())), x.new_zeros(()))


def test_values_of_inputs_are_known_to_nobody() -> None:
    with refused(ModelError, "_Data", "reads a number out of a tensor"):
        trace(_Data(), (torch.randn(2, 4), torch.tensor([1, 1])))


class _OfTheBatch(nn.Module):
    """Rows in an order that goes across samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.cat([torch.arange(len(x)).flip(0)])
        if order.tolist()[0] < 1:
            return x.mean()
        return (self.linear(x)[order] * torch.stack([torch.tensor(float(n)) for n in range(len(x))])[:, None]).mean()


def test_constants_of_the_whole_batch_keep_it_as_it_is() -> None:
    inputs = (torch.randn(2, 4),)
    graph = discover(trace(_OfTheBatch(), inputs))
    assert batch_fault(graph, 2, lambda n: trace(_OfTheBatch(), with_samples(inputs, 2, n))) is not None


def test_marks_are_found_in_each_sample() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert marked.marked_places(mask, 2).tolist() == [[1, 2], [0, 3]]
    assert marked.marked_ranks(mask, 2).tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    with pytest.raises(RuntimeError, match="does not have 1 marked positions"):
        marked.marked_ranks(mask, 1)
    mask[0, 0] = True
    with pytest.raises(RuntimeError, match="does not have 2 marked positions"):
        marked.marked_places(mask, 2)


def test_what_stands_for_pytorchs_calls_is_the_same() -> None:
    module, _, inputs = images()
    plain = module(**inputs)
    with marked.MarkedRows():
        together = module(**inputs)
    torch.testing.assert_close(plain, together)
    assert F.mse_loss(plain, together) == 0


def test_sizes_of_a_batch_are_those_of_the_plan() -> None:
    module, _, inputs = images()
    sizes = torch.tensor(module.model.SIZES).repeat(BATCH, 1, 1)
    assert module(**inputs) == module(**inputs, sizes=sizes)
    sizes[1, 0, 0] = 4
    with pytest.raises(RuntimeError, match="sizes: a sample has other values than the"):
        module(**inputs, sizes=sizes)


class _Packed(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, sizes: torch.Tensor) -> list[object]:
        return [x.shape, positions.shape, sizes.tolist()]


def test_samples_that_are_stacked_are_packed() -> None:
    model = StackedSamples(_Packed(), packed=["x"], second=["positions"], known={"sizes": [[1, 2]]})
    found = model(x=torch.zeros(2, 3, 4), positions=torch.zeros(2, 3, 5))
    assert found == [(6, 4), (3, 2, 5), [[1, 2], [1, 2]]]
    given = model(x=torch.zeros(2, 3, 4), positions=torch.zeros(2, 3, 5), sizes=torch.tensor([[[1, 2]]] * 2))
    assert given == found
    with pytest.raises(RuntimeError, match="sizes: a sample has other values than the"):
        model(x=torch.zeros(2, 3, 4), positions=torch.zeros(2, 3, 5), sizes=torch.tensor([[[1, 2]], [[2, 1]]]))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"packed": "x"}, "packed: 'x' is a text; give a list of names, ['x']"),
        ({"packed": ["y"]}, "packed: unknown argument of _Packed 'y'"),
        ({"packed": ["x"], "second": ["x"]}, "'x' is in packed and in second; say it once"),
        ({"packed": ["sizes"], "known": {"sizes": [[1, 2]]}}, "'sizes' is in packed and in known; say it once: known"),
        (
            {"known": {"sizes": torch.tensor([[1, 2]])}},
            "known: 'sizes' is a Tensor; give lists of integers (sizes.tolist())",
        ),
        ({"known": {"sizes": [[1.5, 2]]}}, "known: 'sizes' has numbers of torch.float32; only integers are sizes"),
        ({"known": {"sizes": [[1], [1, 2]]}}, "known: 'sizes' is no table of integers: expected sequence of length 1"),
        (
            {"known": {"sizes": []}},
            "known: 'sizes' has no numbers; leave it out",
        ),
    ],
)
def test_what_is_said_of_stacked_samples_is_checked(said: dict[str, Any], told: str) -> None:
    with refused(ModelError, told):
        StackedSamples(_Packed(), **said)


class _Open(nn.Module):
    def forward(self, x: torch.Tensor, image_sizes: torch.Tensor, **others: Any) -> list[object]:
        return [image_sizes.tolist(), others["more"].tolist()]


def test_slips_in_names_are_no_further_arguments() -> None:
    x = torch.zeros(2, 3)
    found = StackedSamples(_Open(), known={"image_sizes": [[1, 2]], "more": [[3]]})(x=x)
    assert found == [[[1, 2]] * 2, [[3]] * 2]
    with refused(ModelError, "known: unknown argument of _Open 'image_size'", "image_sizes"):
        StackedSamples(_Open(), known={"image_size": [[1, 2]]})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"x": None}, "the batch: 'x' is a NoneType; stack the samples, B x ..."),
        ({"x": torch.zeros(2)}, "the batch: 'x' is a tensor of float32 of shape (2,); stack the samples, B x ..."),
        ({"x": torch.zeros(6, 4)}, "the batch: 'positions' has 2 samples in its first dim, 'x' has 6; stack the"),
        ({"sizes": [[1, 2]] * 2}, "the batch: 'sizes' is a list; a sample has integers of shape (1, 2), as `known`"),
        ({"sizes": torch.ones(2, 2)}, "'sizes' is a tensor of float32 of shape (2, 2); a sample has integers of shape"),
        ({"sizes": torch.ones(2, 3, 2).long()}, "of shape (2, 3, 2); a sample has integers of shape (1, 2)"),
    ],
)
def test_samples_of_other_shapes_are_refused(changed: dict[str, Any], told: str) -> None:
    model = StackedSamples(_Packed(), packed=["x"], second=["positions"], known={"sizes": [[1, 2]]})
    batch = {"x": torch.zeros(2, 3, 4), "positions": torch.zeros(2, 3, 5)}
    with refused(ModelError, told):
        model(**batch | changed)
    with refused(ModelError, "no 'x', which is packed", "positions"):
        model(positions=torch.zeros(2, 3, 5))
    with refused(ModelError, "the batch has no tensor beside what is known"):
        StackedSamples(_Packed(), known={"sizes": [[1, 2]]})(sizes=torch.tensor([[[1, 2]]]))
