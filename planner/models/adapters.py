"""Low-rank adapters by name: `llama70b+lora=16+lora_layers=q_proj,v_proj` (LoRA, arXiv 2106.09685).

Adapters are part of a model's name, as changed dimensions are. So anyone who has the name, above all a plan file, can
add them again. Every model can have them: a model of the zoo, of a `config.json`, or of a factory (whose other changes
are refused). `planner.models.low_rank` adds them to a module.

    lora            rank of the adapters
    lora_alpha      the product of an adapter is multiplied by alpha / rank (2 x rank)
    lora_dropout    share of the adapter's inputs that is dropped (0)
    lora_layers     names of the linear layers that have one (those in lists of blocks)
    lora_trained    names of modules that are trained in full beside them, such as a new head (none)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.errors import ModelError
from planner.models.overrides import parsed_number, split_reference

RANK, ALPHA, DROPOUT, LAYERS, TRAINED = KEYS = (
    "lora",
    "lora_alpha",
    "lora_dropout",
    "lora_layers",
    "lora_trained",
)
_MOST = 4096
"""The largest rank: above the hidden size of most models an adapter would make no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters to add: see above. Layers and modules are given by the last parts of their names, like
    `target_modules` and `modules_to_save` of peft; without layers, all linear layers in lists of blocks have one."""

    rank: int
    alpha: float
    dropout: float = 0.0
    layers: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()


def without_adapters(reference: str) -> str:
    """The name of the model that adapters are added to."""
    name, changes = split_reference(reference)
    return "+".join([name, *(f"{key}={value}" for key, value in changes.items() if key not in KEYS)])


def with_adapters_of(reference: str, other: str) -> str:
    """`reference` with the adapters of another name, where it names none itself."""
    if without_adapters(reference) != reference:
        return reference
    changes = split_reference(other)[1]
    return "+".join([reference, *(f"{key}={value}" for key, value in changes.items() if key in KEYS)])


def adapters_of(reference: str) -> Adapters | None:
    """The adapters that a name asks for. Raises ModelError for numbers out of range, and for a rank that is missing."""
    changes = {key: value for key, value in split_reference(reference)[1].items() if key in KEYS}
    if not changes:
        return None
    if RANK not in changes:
        raise ModelError(f"{_option(next(iter(changes)))} says more of adapters that --lora asks for; give --lora RANK")
    rank = parsed_number(changes[RANK], int)
    if rank is None or not 1 <= rank <= _MOST:
        raise ModelError(f"--lora {changes[RANK]}: the rank of adapters is a whole number from 1 to {_MOST:,}")
    return Adapters(
        rank=rank,
        alpha=_within(changes, ALPHA, 2.0 * rank, 1e6),
        dropout=_within(changes, DROPOUT, 0.0, 0.99),
        layers=_names(changes, LAYERS),
        trained=_names(changes, TRAINED),
    )


def refuse_unread(read: Collection[str], trained: Collection[str]) -> None:
    """Raise ModelError where the loss depends on a layer, but not on its adapters: code that reads the weight without
    calling the layer does not use them. Both arguments are names of parameters."""
    for name in trained:
        layer, inside, _ = name.rpartition(".lora_A.")
        if inside and name not in read and f"{layer}.weight" in read:
            raise ModelError(
                f"--lora: the model reads the weight of {layer} and does not call the layer, so an adapter beside it"
                " does nothing; name the layers that get adapters without it (--lora-layers)"
            )


def _within(changes: Mapping[str, str], key: str, default: float, most: float) -> float:
    if key not in changes:
        return default
    found = parsed_number(changes[key], float)
    if found is None or not 0 <= found <= most or (key == ALPHA and not found):
        least = "above 0, to" if key == ALPHA else "from 0 to"
        raise ModelError(f"{_option(key)} {changes[key]}: give a number {least} {most:g}")
    return float(found)


def _names(changes: Mapping[str, str], key: str) -> tuple[str, ...]:
    """Names that a comma parts, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in changes.get(key, "").split(",") if name.strip()))
    if key in changes and not names:
        raise ModelError(f"{_option(key)} {changes[key]}: names of modules with commas between them, as q_proj,v_proj")
    return names


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"
