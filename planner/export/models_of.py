"""The model that a configuration trains, if it says so: a name of the zoo, or dimensions that change one of the zoo.

Names in a file are only compared with names that we have; they are never imported or opened.
"""

import re
from collections.abc import Mapping
from typing import Any

from hardware_profiles.foreign import ForeignTextError
from planner.errors import PlannerError
from planner.export.description import ExportError
from planner.export.files.arguments import Options
from planner.export.files.overrides import choice_in, overrides_in
from planner.export.files.recipes import recipe_in
from planner.export.files.settings import Settings
from planner.export.files.yaml_files import settings_of
from planner.export.megatron.launchers import launched
from planner.export.megatron.megatron_reading import experts_of, options_of
from planner.export.megatron.nemo_reading import is_overridden
from planner.export.model_names import model_among, zoo_name
from planner.export.pytorch.torchtitan_content import primus_model
from planner.export.pytorch.trainer_reading import is_trainers, model_named

_FLAVORS: Mapping[str, str] = {
    "llama2": "llama-2-{}", "llama3": "llama-3-{}", "llama3.1": "llama-3-{}", "qwen3": "qwen3-{}",
    "deepseek_v3": "deepseek-{}",
}  # fmt: skip
_SMALLER: Mapping[str, str] = {"llama3": "llama-3.2-{}"}
"""Names of Llama 3.2 models in forks."""
_DEEPSEEK = {"16b": "deepseek-v2-lite", "236b": "deepseek-v2", "671b": "deepseek-v3"}
_DIMENSIONS: Mapping[str, str] = {
    "num-layers": "num_layers", "hidden-size": "hidden_size", "ffn-hidden-size": "ffn_size",
    "num-attention-heads": "num_heads", "num-query-groups": "num_kv_heads", "num-key-value-heads": "num_kv_heads",
    "moe-router-topk": "experts_per_token", "moe-ffn-hidden-size": "expert_size", "kv-channels": "head_size",
    "moe-shared-expert-intermediate-size": "shared_size", "moe-intermediate-size": "expert_size",
}  # fmt: skip
"""Dimensions by the arguments of Megatron-LM, and their names in models of the zoo."""

_HINTS = ("gated", "latent", "strange", "words")
_SWITCHES: Mapping[str, str] = {"qkv_bias": "add-qkv-bias", "qk_norm": "qk-layernorm"}
"""Optional properties of a gated decoder, and the flags of Megatron-LM for them."""
_MAY_BE_NONE = ("dense_layers", "num_experts", "predicted_tokens", "tied_embeddings", *_SWITCHES)
_PADDED = 0.05  # of a vocabulary
_LLAMA_3 = (500_000, 128_256)  # base of its rotary embeddings, and words


def model_of(engine: str, text: str, recipe: str = "") -> str | None:
    """The model of a configuration; None if it does not say. Raises ExportError for a model that cannot be planned."""
    try:
        if engine in ("megatron", "mindspeed"):
            options = options_of(text)
            if "pretrain_bert" in text or "bert" in " ".join(options.words("data-path")):
                return None
            return _named(options.named) if options.named else _by_dimensions(_of_options(options))
        if engine == "torchtitan":
            return _of_torchtitan(text, recipe)
        if engine in ("nemo", "megatron-bridge"):
            given = launched(text)
            return _of_nemo(text, recipe) if given is None else _named(given.named)
        if engine in ("deepspeed", "accelerate") and is_trainers(text):
            named = model_named(text)
            return _named(named) if named else None
        if engine in ("mindformers", "accelerate"):
            settings = settings_of(text)
            if engine == "mindformers":
                return _of_mindformers(settings)
            return _named(str(settings.value("base_model"))) if settings.has("base_model") else None
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    return None


def _named(name: str) -> str | None:
    """The model that a file names; None if the caller must name it. Raises ExportError for a name that the zoo does not
    have."""
    found = zoo_name(name)
    if found is None and (not name.strip() or re.search(r"[$`{}<>]", name)):
        return None
    if found is None:
        raise ExportError(
            f"{name.strip():.80}: no model that can be planned is called so; name the model with --model, or a folder"
            " with its config.json"
        )
    return found


def _of_torchtitan(text: str, recipe: str) -> str | None:
    if re.search(r"^def \w+\(", text, re.MULTILINE):
        return zoo_name(recipe)
    primus = primus_model(text)
    if primus is not None:
        return _named(primus)
    name = re.search(r"""^[ \t]*name[ \t]*=[ \t]*["']([\w.]+)["']""", text, re.MULTILINE)
    flavor = re.search(r"""^[ \t]*flavor[ \t]*=[ \t]*["']([\w.-]+)["']""", text, re.MULTILINE)
    if name is None or flavor is None or name[1] not in _FLAVORS:
        return None
    if name[1] == "deepseek_v3":
        return _DEEPSEEK.get(flavor[1].lower())
    return zoo_name(_FLAVORS[name[1]].format(flavor[1])) or zoo_name(_SMALLER.get(name[1], "").format(flavor[1]))


def _of_nemo(text: str, recipe: str) -> str | None:
    if text.startswith("task,model,size,"):
        return zoo_name("-".join(recipe.split()[1:3]))
    if re.search(r"^(trainer|model):", text, re.MULTILINE):
        given = dict(settings_of(text).all)
        ends = {path.rpartition(".")[2]: value for path, value in given.items() if path.count(".") <= 2}
        named = zoo_name(str(given.get("run.name"))) or zoo_name(str(given.get("run.model_train_name")))
        if "bert_binary_head" in ends:
            return None
        found = _of_yaml(ends)
        return (
            _by_dimensions(found, named) if "hidden_size" in found else zoo_name(str(given.get("run.model_train_name")))
        )
    if is_overridden(text):
        given = overrides_in(text)
        found = _of_yaml({path.rpartition(".")[2]: value for path, value in given.items()})
        named = choice_in(text, "training")
        return _by_dimensions(found) if "hidden_size" in found else _named(named) if named else None
    made = recipe_in(text, recipe)
    return model_among((*(name for name in made.names if "onfig" in name or "model" in name), *made.names, recipe))


def _of_yaml(given: Mapping[str, Any]) -> dict[str, int]:
    names = {
        "num_layers": "num_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "ffn_size",
        "num_attention_heads": "num_heads", "num_query_groups": "num_kv_heads", "num_moe_experts": "num_experts",
        "moe_router_topk": "experts_per_token",
    }  # fmt: skip
    found = {ours: given[theirs] for theirs, ours in names.items() if type(given.get(theirs)) is int}
    activation = str(given.get("activation", "gelu"))
    if activation.endswith("swiglu"):
        found["gated"] = 1
    elif activation not in ("gelu", "fast-gelu", "openai-gelu", "None"):
        found["strange"] = 1
    return found


def _of_options(options: Options) -> dict[str, int]:
    found = {ours: value for name, ours in _DIMENSIONS.items() if (value := options.integer(name)) is not None}
    if experts := experts_of(options):
        found["num_experts"] = experts
        if "ffn_size" in found:  # as wide as an MLP unless stated otherwise
            found.setdefault("expert_size", found["ffn_size"])
    idle = len([word for word in options.word("noop-layers").split(",") if word])
    if "num_layers" in found:
        found["num_layers"] -= idle
    if options.flag("multi-latent-attention"):
        found["latent"] = 1
        for name in ("head_size", "num_kv_heads"):
            found.pop(name, None)
        found["predicted_tokens"] = options.integer("mtp-num-layers", 0) or 0
    if options.flag("swiglu"):
        found["gated"] = 1
    for name in ("padded-vocab-size", "vocab-size"):
        if (words := options.integer(name)) is not None:
            found["words"] = words
    if options.integer("rotary-base") == _LLAMA_3[0]:  # distinguishes Llama 3 from Llama 2
        found.setdefault("words", _LLAMA_3[1])
    if options.word("glu-activation") == "swiglu":  # Megatron-DeepSpeed
        found["gated"] = 1
    if found.get("gated") and not found.get("latent"):
        found |= {ours: options.flag(theirs) for ours, theirs in _SWITCHES.items()}
        if "num_heads" in found:
            found.setdefault("num_kv_heads", found["num_heads"])
        found["tied_embeddings"] = not options.flag("untie-embeddings-and-output-weights")
    if options.flag("squared-relu") or options.flag("quick-geglu"):
        found["strange"] = 1
    return found


def _of_mindformers(settings: Settings) -> str | None:
    of = "model.model_config."
    names = {
        "num_layers": "num_layers", "num_hidden_layers": "num_layers", "hidden_size": "hidden_size",
        "intermediate_size": "ffn_size", "num_heads": "num_heads", "num_attention_heads": "num_heads",
        "n_kv_heads": "num_kv_heads", "num_key_value_heads": "num_kv_heads", "vocab_size": "words",
        "padded_vocab_size": "words",
    }  # fmt: skip
    found: dict[str, int] = {}
    for theirs, ours in names.items():
        value = settings.value(of + theirs)
        if type(value) is int:
            found[ours] = value
    experts = settings.value("moe_config.expert_num")
    if type(experts) is int and experts > 1:
        found["num_experts"] = experts
        if "ffn_size" in found:
            found["expert_size"] = found.pop("ffn_size")
    if "num_heads" in found:
        found.setdefault("num_kv_heads", found["num_heads"])
    arch = " ".join(str(settings.value(f"{of}{key}")) for key in ("type", "model_type", "architectures")).lower()
    arch += str(settings.value("model.arch.type")).lower()
    found |= {"qk_norm": "qwen3" in arch, "qkv_bias": settings.value(f"{of}qkv_has_bias") is True or "qwen2" in arch}
    return _by_dimensions({**found, "gated": 1})


def _by_dimensions(found: Mapping[str, int], named: str | None = None) -> str | None:
    """The model of the zoo with these dimensions, or the nearest one with some of them changed.

    Of equally near models, the `named` one. None if dimensions are missing. Raises ExportError if no family of the zoo
    has them.
    """
    width = "ffn_size" in found or "num_experts" in found or not found.get("gated")
    if not found.keys() >= {"hidden_size", "num_layers", "num_heads"}:
        return None
    wanted = {key: value for key, value in found.items() if key not in _HINTS}
    for key, value in wanted.items():
        if value < (least := 0 if key in _MAY_BE_NONE else 1):
            raise ExportError(f"{key} = {value}: write a number from {least} on, or name the model with --model")
    if found.get("strange"):
        raise ExportError("the activation of its MLP is in no family that can be planned; name a model with --model")
    family = "deepseek" if found.get("latent") else "llama" if found.get("gated") else "gpt"
    if family == "gpt":
        wanted.pop("num_kv_heads", None)
        found_size, usual = wanted.pop("ffn_size", None), 4 * wanted["hidden_size"]
        if found_size not in (None, usual):
            raise ExportError(
                f"its MLP of {found_size} has no gates: such a one of GPT is 4 x the hidden size, {usual}; name a model"
                " with --model"
            )
    nearest = _nearest(family, wanted, found.get("words"), named)
    return nearest if width or "+" not in nearest else None


def _nearest(family: str, wanted: Mapping[str, int], words: int | None, named: str | None) -> str:
    """The nearest model of a family, with its changes. `words` of the (padded) vocabulary distinguish models, but
    change none."""
    from planner.models.overrides import changed_reference
    from planner.models.zoo import ZOO, zoo_entry

    best: tuple[int, str, dict[str, int]] | None = None
    for name, entry in ZOO.items():
        if entry.family != family:
            continue
        known = {key: value for key, value in dict(entry.dimensions).items() if isinstance(value, int)}
        if bool(wanted.get("num_experts")) != bool(known.get("num_experts")):
            continue
        if known.get("num_experts") and not known.get("dense_layers"):  # its blocks have no dense MLP
            known["ffn_size"] = wanted.get("ffn_size", known.get("ffn_size", 0))
        known.setdefault("head_size", known["hidden_size"] // known["num_heads"])
        known = {"predicted_tokens": 0, "tied_embeddings": False, **dict.fromkeys(_SWITCHES, False), **known}
        known.setdefault("num_kv_heads", known["num_heads"])
        changes = {key: value for key, value in wanted.items() if known.get(key) != value}
        strange = words is not None and abs(known["vocab_size"] / words - 1) > _PADDED
        weight = (
            10 * len(changes) + 50 * ("hidden_size" in changes) + 5 * ("tiny" in name) + 3 * strange - (name == named)
        )
        if best is None or weight < best[0]:
            best = weight, name, changes
    if best is None:
        kind = (
            f"{family} model with {wanted['num_experts']} experts" if wanted.get("num_experts") else f"{family} model"
        )
        raise ExportError(f"no {kind} can be planned with these dimensions; name a model with --model")
    try:
        reference = changed_reference(best[1], [f"{key}={value}" for key, value in sorted(best[2].items())])
        zoo_entry(reference)
    except PlannerError as error:
        raise ExportError(
            f"its dimensions make no model that can be planned ({error}); name one with --model"
        ) from error
    return reference
