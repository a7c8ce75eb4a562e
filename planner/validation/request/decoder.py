"""The decoder of a row: the family, dimensions and precision of its model."""

import re

from planner.errors import RequestError
from planner.models.dimensions import Dimensions, ExpertDimensions, Family
from planner.strategy_search.job import PRECISION
from planner.validation.frameworks.nanotron import is_nanotron, nanotron_vocabulary
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.request.expert_dimensions import experts_of, latent_like, parameters_of_its_kind, with_unsaid
from planner.validation.stack.stack_names import pads_vocabulary
from planner.validation.unsupported import UnsupportedError

VOCABULARY_MULTIPLE = 128
"""Megatron pads vocabularies to a multiple of this, so that they can be sharded."""

_ALIGNED = 8
"""16-bit elements whose rows tensor cores read at their full rate."""

USUAL_VOCABULARY = 32000
"""Llama 2's vocabulary, if a row does not state one."""

AGREEING = 0.07
"""Largest relative difference between the parameters of the dimensions and the published ones."""

_UNITS = {"M": 1e6, "T": 1e12}
"""Units of published numbers of parameters other than billions."""

_NORMED_HEADS = (
    r"(?<![a-z])qwen[-_ ]?3(?![\d.b]|[-_ ]next)|(?<![a-z])olmo[-_ ]?(?:[23]|1124)(?![\d.b])"
    r"|(?<![a-z])qk[-_ ]?(?:(?:layer|rms|l2)?[-_ ]?norm|ln(?![a-z]))"
)
"""Models with normalised queries and keys (Qwen3: arXiv 2505.09388; OLMo 2 and 3, which normalise all heads together
and move as much: arXiv 2501.00656, `olmo3_7B` of OLMo-core), and words for it."""

_NEMOTRON = r"nemotron|(?<![a-z])(?:rotary|rope)(?![a-z])|squared[-_ ]?relu|(?<![a-z])relu(?:2|\^2)"
"""Words for models whose MLP has two matrices, but which are no GPT: rotary positions, squares of ReLU (Nemotron-4,
arXiv 2402.16819)."""


def padded_vocabulary(size: int) -> int:
    """The next multiple of `VOCABULARY_MULTIPLE`."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def model_of(row: Row, notes: list[str]) -> Dimensions:
    """The decoder with the row's dimensions whose number of parameters is closest to the published one.

    Raises UnsupportedError for other architectures, missing dimensions, or parameters that do not agree.
    """
    if row.text("arch").lower() not in ("", "dense", "gqa", "moe"):
        raise UnsupportedError(
            f"the architecture is {row.text('arch')}; dense decoders and mixtures of experts are built from dimensions"
        )
    candidates = _candidates(row, _precision(row, notes), notes)
    published = row.parameters or parameters_of_its_kind(candidates[0])
    if published is None:
        if candidates[0].ffn == 4 * candidates[0].hidden:  # gpt and llama models both have this width
            notes.append(f"n_params_B unknown: taken for a {candidates[0].family}")
        return candidates[0]
    best = min(candidates, key=lambda model: abs(model.parameters - published))
    usual = candidates[0]
    if best.family == usual.family == "gpt" and abs(usual.parameters - published) <= _rounding(row):
        best = usual
    if abs(best.parameters / published - 1) > AGREEING:
        raise UnsupportedError(
            f"the dimensions make {best.parameters / 1e9:.3g} billion parameters ({best.family}), published are"
            f" {published / 1e9:.3g}: another architecture, or reduced layers"
        )
    return best


def _rounding(row: Row) -> float:
    """By how many parameters a model may differ from the published number, which has only so many digits.

    A GPT of 174.6 billion parameters, with a head of its own 175.2, is published as one of 175.
    """
    text = row.text("n_params_B").upper()
    number = re.split("[A-Z]", text, maxsplit=1)[0]
    unit = _UNITS.get(text[len(number) :][:1], 1e9)
    decimals = number.partition(".")[2].rstrip(" 0")
    return 0.5 * unit * 0.1 ** len(decimals)


def _kinds(row: Row, *, as_gpt: bool) -> list[tuple[Family, bool]]:
    """Families, and whether they share embeddings with the head, the most usual one first.

    `as_gpt`: whether GPT has these dimensions. But for its positions and biases it has as many parameters as a
    Nemotron, so a rounded number does not tell one from the other. Such a model is a GPT, unless its name or its flags
    say otherwise.
    """
    llama: list[tuple[Family, bool]] = [("llama", False), ("llama", True)]
    nemotron: list[tuple[Family, bool]] = [("nemotron", False), ("nemotron", True)]
    if not as_gpt:
        return [*llama, *nemotron]
    if mentions(row.words("model", "other_flags"), _NEMOTRON):
        return [("gpt", True), *llama, *nemotron]
    return [("gpt", True), *llama, ("gpt", False)]


def _candidates(row: Row, precision: str, notes: list[str]) -> list[Dimensions]:
    """Decoders with these dimensions, the most usual one first."""
    hidden, heads, head = row.needed("hidden"), row.needed("n_heads"), row.integer("head_dim")
    experts = experts_of(row, notes)
    like = latent_like(row, notes) if row.latent else ""
    if like:
        assert experts is not None, row  # `like` was found by their number
        experts, head = with_unsaid(experts, row, like), None
    kv_heads = _kv_heads(row, heads, notes)
    ffn = _ffn(row, hidden, experts, notes)
    vocabulary = _vocabulary(row, notes)
    if hidden % heads and head is None and not like:
        raise UnsupportedError(f"head_dim is empty, and {heads} heads do not divide hidden={hidden}")
    kv_heads = _replicated(row, kv_heads, heads, notes)
    as_gpt = ffn == 4 * hidden and kv_heads == heads and experts is None and head in (None, hidden // heads)
    kinds: list[tuple[Family, bool]] = [("deepseek", False)] if like else _kinds(row, as_gpt=as_gpt)
    return [
        Dimensions(
            family=family,
            layers=row.needed("n_layers"),
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            vocabulary=vocabulary,
            tied=tied,
            sequence=row.needed("seq_len"),
            precision=precision,
            head_size=None if head is None or head * heads == hidden else head,
            experts=experts,
            like=like,
            qk_norm=family in ("llama", "nemotron") and normalises_heads(row),
        )
        for family, tied in kinds
    ]


def _kv_heads(row: Row, heads: int, notes: list[str]) -> int:
    """Heads of keys and values. Raises UnsupportedError for grouped queries without their number."""
    kv_heads = row.integer("n_kv_heads")
    if kv_heads is not None:
        return kv_heads
    if row.text("arch").lower() == "gqa":
        raise UnsupportedError("n_kv_heads is empty")
    notes.append("n_kv_heads unknown: as many as heads")
    return heads


def _replicated(row: Row, kv_heads: int, heads: int, notes: list[str]) -> int:
    """Heads of keys and values on all tensor-parallel devices together; each device has at least one.

    Raises UnsupportedError if they do not divide the heads.
    """
    tensor = row.integer("tp") or 1
    if kv_heads < tensor <= heads and tensor % kv_heads == heads % tensor == 0:
        kv_heads = tensor
        notes.append(f"keys and values once for each of {tensor} tensor parallel devices, as there are fewer of them")
    if heads % kv_heads:
        raise UnsupportedError(f"n_kv_heads={kv_heads} does not divide n_heads={heads}")
    return kv_heads


def _ffn(row: Row, hidden: int, experts: ExpertDimensions | None, notes: list[str]) -> int:
    """Width of the MLP; that of an expert if no layer is dense."""
    ffn = row.integer("ffn_hidden")
    if ffn is not None:
        return ffn
    if experts is not None and not experts.dense_layers:
        return experts.width
    notes.append("ffn_hidden unknown: 4 x hidden")
    return 4 * hidden


def _vocabulary(row: Row, notes: list[str]) -> int:
    """The vocabulary as the framework of the row pads it."""
    vocabulary = row.integer("vocab")
    if vocabulary is None:
        vocabulary = USUAL_VOCABULARY
        notes.append(f"vocab unknown: {USUAL_VOCABULARY}, as Llama's")
    padded = padded_vocabulary(vocabulary)
    if vocabulary % _ALIGNED and not pads_vocabulary(row):
        padded = vocabulary
        notes.append(
            f"a vocabulary of {vocabulary} that nothing pads: rows of its products are no multiples of 16 bytes"
        )
    if is_nanotron(row):
        padded = nanotron_vocabulary(vocabulary, row.integer("tp") or 1)
        notes.append(f"vocabulary of {padded}, as nanotron pads it")
    return padded


def normalises_heads(row: Row) -> bool:
    """Whether a row says, by its model's name or by flags, that queries and keys are normalised."""
    return mentions(row.words("model", "other_flags"), _NORMED_HEADS)


def _precision(row: Row, notes: list[str]) -> str:
    try:
        precision = row.precision()
    except RequestError as error:
        raise UnsupportedError(str(error)) from error
    if precision is None:
        notes.append(f"precision unknown: {PRECISION}")
        return PRECISION
    if precision == "fp8":
        notes.append("fp8: products in fp8, all else in bf16")
        return "bf16"
    return precision
