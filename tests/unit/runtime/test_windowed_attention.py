"""Attention under masks that are known by their kind computes what it does under the mask they stand for: in blocks,
and slice by slice of the sequence."""

import itertools

import pytest
import torch

from planner.sharding import window as windows
from planner.sharding.window import Window
from runtime.ops.attention.attention_pieces import Hop, attend_to_all, hops_of
from runtime.ops.attention.hidden import Mask
from runtime.ops.attention.sliced_attention import sliced_attention
from runtime.ops.local.local_attention import under_whole_mask
from runtime.ops.slice_pass import SlicePass, Together
from tests.contract.rule_calls import dense_attention

BATCH, HEADS, LENGTH = 2, 4, 40
WINDOWS = {
    "window": Window(back=4, ahead=0),
    "causal": Window(ahead=0),
    "both ways": Window(back=2, ahead=3),
    "prefix": Window(ahead=0, prefix=6),
    "chunks": Window(ahead=0, chunk=16),
    "windows in chunks": Window(back=4, ahead=2, chunk=16),
    "all": Window(),
    "itself": Window(back=0, ahead=0),
}
DOCUMENTS = torch.tensor([[0] * 13 + [1] * 20 + [2] * 7, [3] * LENGTH])
SEEN = torch.tensor([[0] * 4 + [1] * 36, [1] * LENGTH])  # the first queries of a sample see nothing at all
Tensors = list[torch.Tensor]


def drawn(width: int) -> Tensors:
    generator = torch.Generator().manual_seed(width)
    extents = ((HEADS, 8), (2, 8), (2, width), (HEADS, width))
    return [torch.randn(BATCH, n, LENGTH, d, generator=generator, dtype=torch.float64) for n, d in extents]


def dense(
    given: Tensors,
    window: Window,
    documents: torch.Tensor | None,
    seen: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Tensors:
    *operands, gradient = given
    leaves = [tensor.clone().requires_grad_() for tensor in (*operands, *(() if sinks is None else (sinks,)))]
    says = {"back": window.back, "ahead": window.ahead, "prefix": window.prefix, "chunk": window.chunk}
    made = dense_attention(*leaves[:3], documents, seen, *leaves[3:], **says, cap=cap, scale=scale, enable_gqa=True)  # type: ignore[arg-type, misc]
    made.backward(gradient)
    return [made.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_make_what_the_whole_mask_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window, run = WINDOWS[name], ((0, LENGTH),)
    for most, width, documents, seen in itertools.product((2**20, 1), (8, 6), (None, DOCUMENTS), (None, SEEN)):
        monkeypatch.setattr(windows, "SCORES", most)  # all at once, and the fewest queries at a time
        given = drawn(width)
        leaves = [tensor.clone().requires_grad_() for tensor in given[:3]]
        mask = Mask(window=window, documents=documents, seen=seen)
        made = attend_to_all(*leaves, hops_of(mask, run, run, BATCH * HEADS), None)
        made.backward(given[3])
        found = [made.detach(), *(leaf.grad for leaf in leaves)]
        expected = dense(given, window, documents, seen)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(under_whole_mask(*given[:3], mask, None), expected[0])


@pytest.mark.parametrize("name", ["window", "causal", "itself", "chunks"])
def test_slices_make_what_the_whole_sequence_does(name: str) -> None:
    slices, window = 4, WINDOWS[name]
    for documents, seen in itertools.product((None, DOCUMENTS), (None, SEEN)):
        given = drawn(8)
        together = Together(count=slices, counted={})
        cut = [tensor.chunk(slices, dim=2) for tensor in given]
        numbers = [[None] * slices if t is None else list(t.chunk(slices, dim=1)) for t in (documents, seen)]
        leaves = [[piece.clone().requires_grad_() for piece in pieces] for pieces in cut[:3]]
        made = []
        for number, operands in enumerate(zip(*leaves, strict=True)):
            mask = Mask(window=window, documents=numbers[0][number], seen=numbers[1][number])
            part = SlicePass(number=number, together=together)
            made.append(sliced_attention(*operands, part, "attention", None, mask))
        for number in reversed(range(slices)):
            made[number].backward(cut[3][number])
        found = [torch.cat(made, dim=2).detach()]
        found += [torch.cat([leaf.grad for leaf in pieces if leaf.grad is not None], dim=2) for pieces in leaves]
        for one, other in zip(found, dense(given, window, documents, seen), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WINDOWS)
def test_sinks_take_their_part_of_what_blocks_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window, run, sinks = WINDOWS[name], ((0, LENGTH),), torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    for most, width, seen in itertools.product((2**20, 1), (8, 6), (None, SEEN)):
        monkeypatch.setattr(windows, "SCORES", most)
        given = drawn(width)
        leaves = [tensor.clone().requires_grad_() for tensor in (*given[:3], sinks)]
        mask = Mask(window=window, documents=DOCUMENTS, seen=seen)
        made = attend_to_all(*leaves[:3], hops_of(mask, run, run, BATCH * HEADS), None, leaves[3])
        made.backward(given[3])
        found = [made.detach(), *(leaf.grad for leaf in leaves)]
        for one, other in zip(found, dense(given, window, DOCUMENTS, seen, sinks), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["window", "chunks"])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, HEADS, dtype=torch.float64)], ids=["cap", "both"])
def test_capped_scores_of_blocks_are_those_of_the_whole(name: str, sinks: torch.Tensor | None) -> None:
    window, run, given = WINDOWS[name], ((0, LENGTH),), drawn(8)
    mask = Mask(window=window, documents=DOCUMENTS, seen=None)
    leaves = [tensor.clone().requires_grad_() for tensor in (*given[:3], *(() if sinks is None else (sinks,)))]
    taken = leaves[3] if sinks is not None else None
    made = attend_to_all(*leaves[:3], hops_of(mask, run, run, BATCH * HEADS), 0.9, taken, 0.7)
    made.backward(given[3])
    shown = dense(given, window, DOCUMENTS, None, sinks, cap=0.7, scale=0.9)
    for one, other in zip([made.detach(), *(leaf.grad for leaf in leaves)], shown, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_capped_scores_of_slices_are_those_of_the_whole() -> None:
    slices, window, given = 4, WINDOWS["causal"], drawn(8)
    together = Together(count=slices, counted={})
    leaves = [[piece.clone().requires_grad_() for piece in tensor.chunk(slices, dim=2)] for tensor in given[:3]]
    made = []
    for number, operands in enumerate(zip(*leaves, strict=True)):
        part = SlicePass(number=number, together=together)
        made.append(sliced_attention(*operands, part, "attention", None, Mask(window=window), None, 0.7))
    for number in reversed(range(slices)):
        made[number].backward(given[3].chunk(slices, dim=2)[number])
    found = [torch.cat(made, dim=2).detach()]
    found += [torch.cat([leaf.grad for leaf in pieces if leaf.grad is not None], dim=2) for pieces in leaves]
    for one, other in zip(found, dense(given, window, None, None, cap=0.7), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_sinks_of_slices_get_the_gradients_of_all_of_them() -> None:
    slices, window, sinks = 4, WINDOWS["window"], torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    given, together, sinks = drawn(8), Together(count=slices, counted={}), sinks.requires_grad_()
    leaves = [[piece.clone().requires_grad_() for piece in tensor.chunk(slices, dim=2)] for tensor in given[:3]]
    made = []
    for number, operands in enumerate(zip(*leaves, strict=True)):
        part = SlicePass(number=number, together=together)
        made.append(sliced_attention(*operands, part, "attention", None, Mask(window=window), sinks))
    for number in reversed(range(slices)):
        made[number].backward(given[3].chunk(slices, dim=2)[number])
    expected = dense(given, window, None, None, sinks.detach())
    torch.testing.assert_close(torch.cat(made, dim=2).detach(), expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sinks.grad, expected[-1], rtol=1e-12, atol=1e-12)


def test_a_block_is_told_of_no_more_keys_than_its_queries_see() -> None:
    mask, run = Mask(window=WINDOWS["window"]), ((0, 4096),)
    hops = hops_of(mask, run, run, 1)
    pairs = sum((hop.queries.stop - hop.queries.start) * (hop.keys.stop - hop.keys.start) for hop in hops)
    assert mask.window.pairs(0, 4096, 4096) < pairs < 6 * mask.window.pairs(0, 4096, 4096)


@pytest.mark.parametrize("name", WINDOWS)
def test_pairs_are_those_of_the_mask(name: str) -> None:
    window, at = WINDOWS[name], torch.arange(LENGTH)
    shown = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    shown = shown if window.back is None else shown.triu(-window.back)
    shown = shown if window.ahead is None else shown.tril(window.ahead)
    shown = shown if window.chunk is None else shown & (at[:, None] // window.chunk == at // window.chunk)
    shown = shown | (at < window.prefix)
    for first, count in ((0, LENGTH), (0, 7), (11, 20)):
        assert window.pairs(first, count, LENGTH) == int(shown[first : first + count].sum())
        met = window.keys(first, count, 5, 20)
        columns = shown[first : first + count].any(0).nonzero().flatten().tolist()
        assert set(met) >= {key for key in columns if 5 <= key < 25}


def test_heads_of_a_token_lie_side_by_side() -> None:
    """As fused kernels have them: what puts the heads together copies nothing, and holds nothing more."""
    query, key, value, _ = drawn(6)  # values of another width than keys, for which CPUs have no such kernel
    whole_sequence = (Hop(queries=slice(0, LENGTH), keys=slice(0, LENGTH), causal=True),)
    made = attend_to_all(query, key, value, whole_sequence, None)
    assert made.transpose(1, 2).is_contiguous()
