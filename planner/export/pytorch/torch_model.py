"""The decoder that `plan export --to torch` writes: `model.py`, from templates.

model.py      attend, Decoder       of all families
  layers      Attention, MLP, Block of one: llama, gpt, deepseek
    experts   Experts, SparseMLP    if it has experts
      router  Router, Balanced      as DeepSeek chooses them
  ring        Ring                  if the context is a ring
"""

import re
from importlib.resources import files

from planner.export.architecture import Architecture, Latent
from planner.export.description import Description
from planner.export.files.quoting import in_docstring

_TANH = ', approximate="tanh"'
_NORMED = "\n        query_BSND, key_BSKD = self.q_norm(query_BSND), self.k_norm(key_BSKD)"
_IMPORTS_EXPERTS = "\nfrom torch.distributed.tensor import DTensor"
_IMPORTS_RINGS = "\nfrom torch.distributed.tensor.experimental._context_parallel import _attention as rings"
_BY_RING = ", or keys and values go\n    round them"
_RING = """
    if context is not None:
        copies = query_BNSD.size(1) // key_BKSD.size(1)
        key_BNSD, value_BNSD = (x.repeat_interleave(copies, dim=1) for x in (key_BKSD, value_BKSD))
        return Ring.apply(query_BNSD, key_BNSD, value_BNSD, context).transpose(1, 2)"""
_PADDED_RING = """
    if context is not None:  # kernels of rings take values as long as keys
        value_BNSD = F.pad(value_BKSD, (0, key_BKSD.size(-1) - value_BKSD.size(-1)))
        return Ring.apply(query_BNSD, key_BKSD, value_BNSD, context)[..., :HEAD_SIZE].transpose(1, 2)"""
_FROM_RANK = """
        self.q_a_proj = nn.Linear(HIDDEN, QUERY_RANK, bias=False)
        self.q_a_layernorm = nn.RMSNorm(QUERY_RANK, eps=EPSILON)
        self.q_b_proj = nn.Linear(QUERY_RANK, HEADS * (PLAIN + ROTARY), bias=False)"""
_AT_ONCE = "\n        self.q_proj = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTARY), bias=False)"
_BEST = """weights_RK, chosen_RK = F.softmax(self.gate(x_RH), dim=-1, dtype=torch.float32).topk(CHOSEN, dim=-1)
        if NORMALISED:
            weights_RK = weights_RK / weights_RK.sum(dim=-1, keepdim=True)"""
_ROUTED = "weights_RK, chosen_RK, loss, loads_E = self.router(self.gate(x_BSH))"
_COUNTED = "        result_RH = Balanced.apply(result_RH, loss, loads_E, self.router)\n"
_TOLD = """    for router in routers_of([model]):
        router.steps_E.zero_()
        router.context = None if meshes.context is None else meshes.context["context"].get_group()
        router.share = 1.0 if PIPELINE > 1 else 1 / MICRO_BATCHES  # schedules divide gradients themselves
"""
_BALANCE = "\n        loss = loss + balance_of(stages, mesh)"


def model_of(name: str, a: Architecture, d: Description, length: int) -> str:
    """`model.py` for sequences of `length` tokens."""
    latent = a.latent is not None
    ring = _PADDED_RING if latent else _RING
    return filled(
        "model.py",
        TITLE=in_docstring(name),
        IMPORTS=(_IMPORTS_EXPERTS if a.experts else "") + (_IMPORTS_RINGS if d.ring > 1 else ""),
        SCALED=" * HIDDEN**0.5" if a.scaled_embeddings else "",
        DIMENSIONS=_dimensions(a, d.tensor, length),
        BYRING=_BY_RING if d.ring > 1 else "",
        RING=ring if d.ring > 1 else "",
        RINGS=f"{filled('ring.py').rstrip()}\n" if d.ring > 1 else "",
        LAYERS=_layers(a).rstrip(),
    )


def routers_of(a: Architecture) -> dict[str, str]:
    """Values for `train.py` for routers that balance loads."""
    if a.routing is None:
        return {"ROUTER": "", "ROUTERS": "", "BALANCE": "", "EVENING": ""}
    return {
        "ROUTER": ", Router",
        "ROUTERS": _TOLD,
        "BALANCE": _BALANCE,
        "EVENING": f"{filled('balance.py').strip()}\n\n\n",
    }


def filled(name: str, **texts: str) -> str:
    """A template with all its places filled in one pass, so that no text fills the places of another."""
    template = files("planner.export.pytorch").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda place: texts[place[1]], template)


def _layers(a: Architecture) -> str:
    sparse = "MLP(WIDTH)"
    if a.experts:
        dense = a.experts.dense_layers
        sparse = f"MLP(WIDTH) if number < {dense} else SparseMLP()" if dense else "SparseMLP()"
    norms = "nn.RMSNorm(HEAD_SIZE, eps=EPSILON)"
    ranked = a.latent is not None and a.latent.q_rank > 0
    return filled(
        f"{a.family}_layers.py",
        BIAS=repr(a.qkv_bias),
        HEADNORMS=f"\n        self.q_norm, self.k_norm = {norms}, {norms}" if a.qk_norm else "",
        NORMED=_NORMED if a.qk_norm else "",
        ACTIVATION=f"F.{'gelu' if a.gelu else 'silu'}(self.gate_proj(x_BSH){_TANH if a.gelu else ''})",
        QUERIES=_FROM_RANK if ranked else _AT_ONCE,
        QUERY="self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSH)))" if ranked else "self.q_proj(x_BSH)",
        EXPERTS=_experts(a),
        MLP=sparse,
    )


def _experts(a: Architecture) -> str:
    if a.experts is None:
        return ""
    if a.routing is None:
        return filled("experts.py", ROUTER="", ROUTED="", CHOICE=_BEST, COUNTED="")
    scores = "logits_BSE.float().sigmoid()"
    if not a.routing.sigmoid:
        scores = "F.softmax(logits_BSE, dim=-1, dtype=torch.float32)"
    router = f"{filled('router.py', SCORES=scores).strip()}\n\n\n"
    return filled(
        "experts.py", ROUTER=router, ROUTED="\n        self.router = Router()", CHOICE=_ROUTED, COUNTED=_COUNTED
    )


def _dimensions(a: Architecture, tensor: int, length: int) -> str:
    """Constants of the model."""
    gpt = a.family == "gpt"
    rotary = 0 if gpt else a.latent.rotary if a.latent else a.head_size
    known: dict[str, object] = {
        "HIDDEN": a.hidden, "WIDTH": a.ffn, "HEADS": a.heads, "KEY_HEADS": a.kv_heads, "HEAD_SIZE": a.head_size,
        "VOCABULARY": a.vocabulary, "PADDED": -(-a.vocabulary // tensor) * tensor, "SEQUENCE": length,
        "ROTARY": rotary, "ROTARY_BASE": a.rope_theta, "EPSILON": a.epsilon, "TIED": a.tied,
        "EXPERTS": a.experts.count if a.experts else 0,
    }  # fmt: skip
    if a.latent:
        known |= _latent(a.latent)
    if a.experts:
        known |= {
            "EXPERT_WIDTH": a.experts.width, "CHOSEN": a.experts.chosen, "SHARED_WIDTH": a.experts.shared_width,
            "NORMALISED": a.normalised,
        }  # fmt: skip
    if a.routing:
        known |= {
            "WEIGHT_SCALE": a.routing.scale, "GROUPS": a.routing.groups, "CHOSEN_GROUPS": a.routing.chosen,
            "GROUPS_BY": a.routing.groups_by, "BALANCE_LOSS": a.balance_loss, "BIAS_SPEED": a.routing.bias_speed,
        }  # fmt: skip
    attention = ("qkv_proj",) if gpt else ("q_proj", "k_proj", "v_proj")
    into = ("up_proj",) if gpt else ("gate_proj", "up_proj")
    headed = a.qk_norm and not a.latent
    cut = (*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in into))
    known |= {
        "COLUMNS": () if a.latent else cut,
        "ROWS": () if a.latent else ("self_attn.o_proj", "mlp.down_proj"),
        "HEAD_NORMS": ("self_attn.q_norm", "self_attn.k_norm") if headed else (),
    }
    lines = [f"{name} = {value!r}" for name, value in known.items()]
    return "\n".join([*lines, f"NORM = nn.{'LayerNorm' if gpt else 'RMSNorm'}"])


def _latent(latent: Latent) -> dict[str, object]:
    return {"QUERY_RANK": latent.q_rank, "KEY_RANK": latent.kv_rank, "PLAIN": latent.plain}
