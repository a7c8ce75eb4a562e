"""Requests that divide into nothing: one line with what was asked, the numbers that clash, the nearest legal values.

A legal value that is named can be had, and nothing between it and what was wanted can.
"""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from planner.errors import RequestError
from planner.nearest import around, divisors, multiples, nearest_of, nearest_words
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.engine.outcome_words import nothing_fits
from planner.strategy_search.request.refusals import no_configuration, space_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from planner.strategy_search.within import within
from tests.unit.search.cases import cluster_of, request_of, template_of


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request, how it is refused, and the values that the message names as the nearest legal ones of options."""

    asked: dict[str, Any]
    words: str
    near: dict[str, tuple[int, ...]] = field(default_factory=dict)
    model: str = "llama-4"
    devices: int = 4
    batch: int = 16
    update: Update = PLAIN

    def request(self, **other: Any) -> SearchRequest:
        """The request, or one with other values."""
        batch = other.pop("global_batch", self.batch)
        pinned = Pinned(**{**self.asked, **other})
        return request_of(self.model, cluster_of("cpu", self.devices), batch, pinned=pinned, update=self.update)

    def wanted(self, option: str) -> int:
        if option == "global_batch":
            return self.batch
        value = self.asked[option]
        assert isinstance(value, int)
        return value


REFUSALS = [
    # degrees and devices
    Refusal(asked={"pipeline": 3}, words="pipeline = 3 does not divide 4 devices", near={"pipeline": (2, 4)}),
    Refusal(asked={"tensor": 8}, words="tensor = 8 does not divide 4 devices", near={"tensor": (4,)}),
    Refusal(asked={"data": 3}, words="data = 3 does not divide 4 devices", near={"data": (2, 4)}),
    Refusal(asked={"context": 3}, words="3 devices by heads do not divide a sequence of 16", near={"context": (2, 4)}),
    Refusal(
        asked={"pipeline": 4, "data": 2, "tensor": 2},
        words="pipeline = 4 x data = 2 x tensor = 2 makes 16, which does not divide 8 devices",
        near={"pipeline": (2,), "data": (1,), "tensor": (1,)},
        devices=8,
    ),
    Refusal(
        asked={"pipeline": 1, "data": 2, "context": 1, "tensor": 2},
        words="pipeline = 1 x data = 2 x context = 1 x tensor = 2 makes 4, not 8 devices",
        near={"pipeline": (2,), "data": (4,), "context": (2,), "tensor": (4,)},
        devices=8,
    ),
    Refusal(
        asked={"mesh": (2, 2), "pipeline": 4},
        words="mesh = 2x2 has 4 devices, and pipeline = 4 such stages do not make 8; the nearest legal values are mesh"
        " = 2, pipeline",
        near={"pipeline": (2,)},
        devices=8,
    ),
    Refusal(
        asked={"mesh": (3,)},
        words="mesh = 3 has 3 devices, which do not divide 4; the nearest legal values are mesh = 2 and 4",
    ),
    # blocks
    Refusal(
        asked={"pipeline": 8},
        words="llama-4 has 4 blocks, too few for pipeline = 8",
        near={"pipeline": (4,)},
        devices=8,
    ),
    Refusal(
        asked={"pipeline": 2},
        words="perceptron cannot be cut into 2 pipeline stages",
        near={"pipeline": (1,)},
        model="perceptron",
    ),
    Refusal(
        asked={"pipeline": 2, "virtual_stages": 4},
        words="virtual_stages = 4 on pipeline = 2 ranks: 8 stages are too many for 4 blocks",
        near={"virtual_stages": (3,)},
    ),
    Refusal(
        asked={"pipeline": 2, "virtual_stages": 2, "even": True},
        words="virtual_stages = 2 on pipeline = 2 ranks: 4 stages do not divide 6 blocks",
        near={"virtual_stages": (1, 3)},
        model="llama-6-tied",
    ),
    Refusal(
        asked={"pipeline": 2, "virtual_stages": 4, "even": True},
        words="virtual_stages = 4 on pipeline = 2 ranks: virtual stages hold equal blocks here, and 8 stages of 8"
        " blocks hold",
        near={"virtual_stages": (2,)},
        model="kinds-in-turn",
    ),
    Refusal(
        asked={"virtual_stages": 5},
        words="virtual_stages = 5 on any number of ranks: 10 stages are too many for 4 blocks",
        near={"virtual_stages": (3,)},
    ),
    Refusal(
        asked={"schedule": "interleaved_1f1b", "pipeline": 4},
        words="schedule = interleaved_1f1b on pipeline = 4 ranks: 8 stages are too many for 4 blocks",
        near={"pipeline": (2,)},
    ),
    # micro-batches
    Refusal(
        asked={"micro_batches": 3},
        words="micro_batches = 3 does not divide the global batch 16",
        near={"micro_batches": (2, 4), "global_batch": (15, 18)},
    ),
    Refusal(
        asked={"micro_batch": 32},
        words="micro_batch = 32 does not divide the global batch 16",
        near={"micro_batch": (16,), "global_batch": (32,)},
    ),
    Refusal(
        asked={"data": 4, "micro_batch": 3},
        words="micro_batch = 3 on each of data = 4 does not divide the global batch 16",
        near={"micro_batch": (2, 4), "global_batch": (12, 24)},
    ),
    Refusal(
        asked={"data": 4, "micro_batches": 8},
        words="data = 4 does not divide the 2 samples of each of micro_batches = 8, of the global batch 16",
        near={"micro_batches": (4,), "data": (2,), "global_batch": (32,)},
    ),
    Refusal(
        asked={"data": 4},
        words="data = 4 does not divide the global batch 6",
        near={"data": (2,), "global_batch": (4, 8)},
        batch=6,
    ),
    Refusal(
        asked={"pipeline": 2, "virtual_stages": 2, "micro_batches": 1},
        words="micro_batches = 1 is no multiple of 2, the pipeline ranks that virtual stages take in rounds",
    ),
    Refusal(
        asked={"pipeline": 2, "virtual_stages": 2},
        words="the number of ranks must divide the number of micro-batches",
        near={"virtual_stages": (1,), "global_batch": (14, 16)},
        batch=15,
    ),
    Refusal(
        asked={"schedule": "pipedream_2bw", "pipeline": 4, "micro_batches": 2},
        words="micro_batches = 2 with pipeline = 4: two versions of the weights are enough from 4 micro-batches on; of"
        " a global batch of 16 the nearest legal value is 4",
    ),
    # copies
    Refusal(
        asked={"interleave": 3, "pipeline": 2},
        words="interleave = 3 divides no number of micro-batches of the global batch 16",
        near={"interleave": (2, 4), "global_batch": (15, 18)},
    ),
    Refusal(
        asked={"interleave": 3, "micro_batches": 4},
        words="interleave = 3 does not divide micro_batches = 4; the nearest legal values are 2 and 4",
    ),
    Refusal(
        asked={"interleave": 4, "micro_batch": 8},
        words="interleave = 4 does not divide the number of micro-batches, 2, that micro_batch = 8 makes of the global",
        near={"interleave": (2,), "micro_batch": (4,), "global_batch": (32,)},
    ),
    Refusal(
        asked={"interleave": 8, "data": 4},
        words="interleave = 8 divides no number of micro-batches of the global batch 16 for each of data = 4",
        near={"interleave": (4,), "data": (2,), "global_batch": (32,)},
    ),
    Refusal(
        asked={"interleave": 2, "schedule": "zb_h1"},
        words="interleave = 2 is not for schedule = zb_h1, which takes its backward pass apart; take interleave"
        " = 1, or 1f1b",
    ),
    # slices
    Refusal(
        asked={"slices": 3, "pipeline": 2},
        words="slices: 3 do not divide a sequence of 16; the nearest legal values are 2 and 4",
    ),
    Refusal(
        asked={"slices": 32, "pipeline": 2},
        words="slices: 32 do not divide a sequence of 16; the nearest legal value is 16",
    ),
    Refusal(asked={"slices": 2, "schedule": "gpipe"}, words="slices = 2 is for schedule = seqpipe, not gpipe"),
    Refusal(asked={"slices": 2, "pipeline": 1}, words="slices = 2 is about a pipeline of 2 ranks or more"),
    Refusal(asked={"schedule": "seqpipe"}, words="schedule = seqpipe takes a sequence in slices, not slices = 1"),
    Refusal(
        asked={"slices": 8, "context": 4, "pipeline": 2, "tensor": 1},
        words="4 devices by heads do not divide a sequence of 2 (a slice of 16); of its length the nearest legal"
        " value is 32; the nearest legal value is context = 2",
        near={"context": (2,)},
        devices=8,
    ),
    # schedules
    Refusal(asked={"schedule": "zb_h1"}, words="schedule = zb_h1 is about a pipeline of 2 ranks or more", devices=1),
    Refusal(
        asked={"schedule": "pipedream", "pipeline": 2},
        words="clip_norm = 1 is about the norm of all gradients",
        update=Update(buckets="none", clip_norm=1.0),
    ),
    # sequences and heads
    Refusal(
        asked={"context": 16, "context_by": "ring", "zigzag": True},
        words="2 x 16 chunks of a ring in zigzag order do not divide a sequence of 16; of its length the nearest legal"
        " value is 32",
        near={"context": (8,)},
        devices=16,
    ),
    Refusal(asked={"zigzag": True}, words="zigzag = yes is about a ring, which context_by = heads has not"),
    Refusal(
        asked={"zigzag": False, "context": 2}, words="zigzag = no is about a ring, which context_by = heads has not"
    ),
    Refusal(
        asked={"tensor": 3, "data": 2},
        words="tensor = 3 does not divide the 8 heads of operator",
        near={"tensor": (1,)},
        devices=6,
    ),
    Refusal(
        asked={"tensor": 4, "context": 4},
        words="tensor = 4 x 4 devices of a context by heads does not divide the 8 heads of operator",
        near={"tensor": (2,), "context": (2,)},
        devices=16,
    ),
    Refusal(
        asked={"context": 8, "context_by": "hybrid", "ulysses": 3},
        words="ulysses = 3 does not divide context = 8; the nearest legal values are 2 and 4",
        devices=8,
    ),
    # a padded batch
    Refusal(
        asked={"micro_batches": 3},
        words="micro_batches = 3 does not divide the global batch 14 with 2 of padding_samples",
        near={"micro_batches": (2, 4)},
        batch=14,
        update=Update(padding_samples=2),
    ),
    Refusal(
        asked={"micro_batch": 3},
        words="micro_batch = 3 does not divide the global batch 16",
        near={"micro_batch": (2, 4)},
        batch=14,
        update=Update(padding_samples=2),
    ),
    # copies of what is shared out
    Refusal(
        asked={"data": 4, "zero": 1, "replicas": 3},
        words="replicas = 3 does not divide the data parallel devices without those of experts, of 4 devices, data = 4",
        near={"replicas": (2, 4)},
    ),
    Refusal(
        asked={"data": 4, "replicas": 2},
        words="replicas = 2: groups of devices share out what zero says, each for itself; give zero = 1, 2 or 3 too",
    ),
    # experts
    Refusal(
        asked={"expert": 3},
        words="expert = 3 does not divide the 4 experts of the model",
        near={"expert": (2, 4)},
        model="mixture",
    ),
    Refusal(
        asked={"expert": 4},
        words="expert = 4 does not divide data x context, of 2 devices",
        near={"expert": (2,)},
        model="mixture",
        devices=2,
    ),
    Refusal(
        asked={"expert": 4},
        words="expert = 4 does not divide data x context, of 6 devices",
        near={"expert": (2,)},
        model="mixture",
        devices=6,
        batch=12,
    ),
    Refusal(
        asked={"data": 2, "tensor": 2, "expert": 4},
        words="expert = 4 does not divide data x context, of 4 devices, data = 2, tensor = 2",
        near={"expert": (2,), "tensor": (1,)},
        model="mixture",
    ),
    Refusal(
        asked={"data": 8, "zero": 1, "replicas": 4, "expert": 4},
        words="replicas = 4 does not divide the data parallel devices without those of experts, of 8 devices, data = 8,"
        " expert = 4",
        near={"replicas": (2,), "expert": (2,)},
        model="mixture",
        devices=8,
    ),
    Refusal(asked={"expert": 2}, words="expert = 2: no operator of this model routes to experts; leave it at 1"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.model}-{refusal.asked}")
def test_what_cannot_be_had_names_the_numbers_and_the_nearest_that_can(refusal: Refusal) -> None:
    with pytest.raises(RequestError) as caught:
        search(refusal.request())
    message = str(caught.value)
    assert refusal.words in message, message
    assert "\n" not in message
    for option, near in refusal.near.items():
        named = " and ".join(map(str, near))
        assert re.search(rf"the nearest legal values? (is|are) (.*{option} = )?{named}\b", message), (option, message)
        legal = [number for number in near if possible(refusal, option, number)]
        assert tuple(legal) == near, f"{option} of {near} can be had: {legal}"
        between = range(max([n for n in near if n < refusal.wanted(option)], default=0) + 1, max(near))
        assert not [n for n in between if n not in near and possible(refusal, option, n)]


def possible(refusal: Refusal, option: str, number: int) -> bool:
    """Whether the request has a configuration with another value of one option."""
    request = refusal.request(**{option: number})
    try:
        return next(space_of(request, template_of(refusal.model)), None) is not None
    except RequestError:
        return False


@pytest.mark.parametrize("update", [PLAIN, Update(gradients="sum"), Update(per_replica=("*",), replicas=1)])
def test_padding_is_advised_where_it_is_taken(update: Update) -> None:
    refusal = Refusal(asked={"micro_batch": 3}, words="", update=update)
    said = no_configuration(refusal.request(), template_of(refusal.model))
    assert "does not divide the global batch 16" in said
    assert ("pad it" in said) == (update == PLAIN)


def test_norms_that_cannot_split_the_sequence() -> None:
    request = request_of(
        "llama-4", cluster_of("cpu", 4), 16, pinned=Pinned(tensor=4, context=1, slices=8, sequence_parallel=True)
    )
    with pytest.raises(RequestError) as caught:
        search(request)
    assert "sequence_parallel = yes: slices = 8 x tensor = 4 does not divide a sequence of 16" in str(caught.value)
    assert "the nearest legal values are slices = 1, tensor = 2, or set sequence_parallel to no" in str(caught.value)


def test_the_words_for_the_nearest() -> None:
    assert around(3, (1, 2, 4, 8)) == (2, 4)
    assert around(3, ()) == ()
    assert nearest_words(3, (4, 2, 2)) == "the nearest legal values are 2 and 4"
    assert nearest_words(9, (4, 2)) == "the nearest legal value is 4"
    assert nearest_words(9, ()) == "there is no legal value"
    assert (
        nearest_of({"a": (3, (2, 4)), "b": (5, ()), "c": (1, (7,))})
        == "the nearest legal values are a = 2 and 4, c = 7"
    )
    assert (multiples(3, 4), multiples(9, 4)) == ((4,), (8, 12))
    assert [divisors(number) for number in (1, 12, 49)] == [(1,), (1, 2, 3, 4, 6, 12), (1, 7, 49)]


def test_an_engine_that_keeps_key_heads_whole_names_the_degrees_that_divide_them() -> None:
    """Four key heads on eight devices."""
    from planner.engines.megatron import MEGATRON

    asked = replace(
        request_of("llama-4", cluster_of("h100-80gb", 8), 16, pinned=Pinned(tensor=8), precision="bf16"), space=MEGATRON
    )
    with pytest.raises(RequestError) as refused:
        search(within(MEGATRON, asked))
    words = (
        "tensor = 8 does not divide the 4 key heads, which plans for Megatron-LM keep whole; the nearest legal value is"
    )
    assert f"{words} 4" in str(refused.value)


@pytest.mark.parametrize("algorithm", ["dynamic_programming", "recursive_programming"])
def test_another_search_is_offered_where_there_is_another(algorithm: str) -> None:
    """Nothing was found, and the leanest plan is not known to need more memory than there is."""
    request = replace(request_of("llama-4", cluster_of("cpu", 4), 16), algorithm=algorithm)
    said = str(nothing_fits(request, math.inf, (0, 1), request.cluster, stopped=False))
    assert "more memory" in said
    assert ("--search dynamic_programming" in said) == (algorithm != "dynamic_programming")
