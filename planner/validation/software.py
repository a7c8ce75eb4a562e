"""Which software a run was done with, as far as its row says.

    what the row says                                            stack
    a name in its column `stack`                                 that one; of Megatron-LM that of its date
    DeepSpeed, ZeRO 3 or less                                    deepspeed-zero3, deepspeed
    PaddlePaddle                                                 paddle
    NeMo, Megatron Bridge                                        nemo; nemo-2606 with experts in fp8, from container
                                                                 26.06 on
    a device of Ascend                                           mindformers by its name, else mindspeed
    MosaicML                                                     llm-foundry
    Megatron FSDP                                                megatron, whatever the ZeRO stage
    ZeRO 3, or modules of Hugging Face                           fsdp, fsdp-compiled where it is compiled
    a loop of PyTorch's own, compiled                            fsdp-compiled
    InternEvo                                                    internevo
    Transformer Engine                                           megatron
    anything else                                                megatron-2021 before 2023 without fused attention,
                                                                 else megatron

Words are looked for in flags and source first, and in notes where those name none; a word that is denied ("not NeMo")
does not count.

Attention kernels go by their name, or by the date: FlashAttention-2 came in July 2023, FlashAttention-3 and the kernels
of cuDNN a year later, and frameworks followed within half a year; in fp32 there are none of them. What hides
communication, and other ways to run a stack, is what the flags of a row name (`planner.validation.flagged`).
"""

import math
import re
from dataclasses import replace

from hardware_profiles import (
    AttentionKernels,
    Cluster,
    Dispatcher,
    Graphs,
    Software,
    UnknownKeyError,
    load_software,
)
from planner.errors import RequestError
from planner.fp8_recipes import MXFP8, ROWWISE
from planner.validation.aleph_alpha import is_aleph_alpha
from planner.validation.flagged import (
    HUGGING_FACE,
    MEGATRON_WORDS,
    gathers_float8,
    liger_kernels,
    narrow_gradients,
    stores_fp8,
    with_kernels,
    with_overlaps,
)
from planner.validation.network import machine_as_stated
from planner.validation.recipes import BRIDGE, of_bridge, recipe_of, release_of
from planner.validation.rows import Row
from planner.validation.words import mentions, mentions_of, says

_SECOND, _THIRD = "2024", "2024-07"  # dates from which runs are taken to use the next generation
_BUCKET = 5e8
"""Elements of gradients that DeepSpeed reduces at once (runtime/pipe/engine.py: MEMORY_OPT_ALLREDUCE_SIZE)."""

_FUSED_ACCUMULATION = "2022-03"
_COPIED_LOGITS = ("2022-10", "2024-07")
"""Months from which on Megatron-LM did as `_of_its_time` says, and until which."""

_EAGER_LOSS = ("2024-12", "2025-04")
"""Months of torchtitan's loss that was not compiled."""

_FUSED_ADAM = "2025-02-24"
"""Date from which on torchtitan's optimizer is one kernel by default (6e4988550)."""

_GROUPED_QUERIES = "2026-01-27"
"""Date until which torchtitan copied keys and values for every query head (`repeat_kv`, gone with ff0829c10)."""

_FUSED_EXPERTS = "26.06"
"""Container from which on recipes with experts in MXFP8 run as one CUDA graph, with fused kernels (Megatron Bridge)."""

_NARROW_GRADIENTS = rf"{BRIDGE}|dgxc|nemo[- ](?:\d|framework)"
"""Sources whose recipes reduce and keep gradients in bf16: Megatron Bridge (perf_recipes: grad_reduce_in_fp32 = False),
NeMo (scripts/performance: the same), and its launcher before (dgxc-benchmarking v24.11.1: grad_sync_dtype: bf16)."""

_RECIPES = "the recipes of NVIDIA for benchmarks have it"

_TRANSFORMER_ENGINE = ("megatron", "nemo", "nemo-2606", "llm-foundry")
"""Stacks whose products in fp8 are those of Transformer Engine: they keep operands in fp8, and where weights are not
stored so keep two copies of them in fp8, as they are and transposed, beside (transformer_engine/pytorch/module)."""

_OTHER_LOSS = r"cross[-_]entropy[-_](?:loss[-_]fusion|fusion[-_]impl)|\beager\b"
"""Words for a loss in one kernel, or for that of PyTorch in a framework of one's own."""

_CHUNKED_LOSS = (
    r"(?<!\b1 )(?<!\bone )chunk(?:s|ed)?[-_ ](?:of the |of )?(?:loss|cross[-_ ]entropy|ce\b)"
    r"|(?:loss|cross[-_ ]entropy|\bce)[-_ ](?:in )?(?!(?:num[-_ ])?chunks?\s*[=: ]\s*1\b)chunk"
)
"""Words for logits and their loss in parts of the tokens, the projection with them (torchtitan's ChunkedCELoss)."""

_CHUNKED_PROJECTION = "2026-04-27"
"""Date from which on torchtitan's loss in chunks has the projection in them (786e26f8e); before it cut logits that were
whole, and kept the logarithms of each chunk in fp32 for the backward pass (components/loss.py at e23bb707d)."""

_GATES_OF_MEGATRON = r"\bbias[-_](?:activation|swiglu)[-_]fusion"
"""Words for gates of Megatron in one kernel; without it operators of PyTorch keep each what it reads
(transformer/mlp.py: glu)."""

_FUSED_LOSS = r"\bfused[- ]cross[- ]entropy|cross[- ]entropy in triton"
"""Words for a loss in one kernel of Triton or CUDA, under FSDP (unsloth's, FlashAttention's). Models of transformers
hand it a copy in fp32 of the logits but those of the last token, beside the logits in fp32 (modeling_llama.py until
4.45: `logits.float()`, `shift_logits.contiguous()`)."""

_PLAIN_LOSS = r"\beager (?:loss|cross[- ]entropy)"
"""Words for a loss that is not compiled, where layers are (prime-rl's sft/train.py: CrossEntropyLoss, all logits)."""

_HELD_LOGITS = r"\blogits (?:are )?held\b"
"""Words for logits in fp32 that a variable still has while gradients are computed, though PyTorch's cross entropy needs
them no more (prime-rl's sft/train.py deletes `logits`, and not the `out` that has them)."""

_DETERMINISTIC = r"deterministic[-_]mode|nvte[-_]allow[-_]nondeterministic[-_]algo\s*[=: ]\s*0\b"
_SHARE = r"\s*[=: ]\s*0?\.\d*[1-9]"
_DROPS_PROBABILITIES = rf"attention[-_]dropout{_SHARE}|(?<![-_a-z])dropout{_SHARE}"
_DROPS_BRANCHES = rf"hidden[-_]dropout{_SHARE}|(?<![-_a-z])dropout{_SHARE}"
"""Words for a backward pass of attention that adds up in one order, for dropout in attention, and for that of branches
that join the residual stream; "dropout 0.1" is both. On Blackwell cuDNN has none of the first two at once, and
Transformer Engine takes FlashAttention-2 then ("determinism on Blackwell" in
transformer_engine/common/fused_attn/fused_attn.cpp; nvcr.io/nvidia/pytorch has flash-attn)."""

_FUSED_DROPOUT = r"bias[-_]dropout[-_](?:add[-_])?fusion"
_FLASH_DROPOUT = (1.05, 1.05)
"""FlashAttention-2 with dropout over without: 0.728 and 0.695 ms, forward and backward together, on GB200 with four
sequences of 1,024 tokens and 16 heads of 128 (NVIDIA/TransformerEngine pull request 3313, flash-attn 2.7.4). The first
generation is taken to lose as much."""

_CUDNN_DROPOUT = (1.03, 1.03)
_FAST_DROPOUT = (1.25, 1.54)
"""Other kernels with dropout over without. cuDNN on H200, 0.614 and 0.594 ms of the same (issue 3312, layout sbhd): the
least, as kernels as short wait for the host. FlashAttention-4 on GB200, with 32,768 tokens: 75 to 85% of the FLOP/s
forward, and 60 to 70% backward (Dao-AILab/flash-attention pull request 2597: cuDNN with dropout is slower backward).
Numbers for each score are hardly drawn behind what else such kernels do (Ma, Liu and Krashinsky 2024, arXiv
2410.07531)."""

_COMPLEX_ROTATIONS = r"torchtitan|kempnerforge"
"""Words for models that rotate heads in complex numbers, for which inductor generates no code (torchtitan issue 15;
kempnerforge/model/position.py). `passes` of fsdp-compiled was fitted to runs of such models, gates counted apart."""

_REAL_ROTATIONS = r"(?<![a-z])qwen[-_ ]?3(?!\d|b(?![a-z0-9]))|gpt[-_ ]?oss"
"""Models of torchtitan that rotate real numbers instead: Qwen3 since the day that it came (7f1fa4815 of August 18,
2025: `rotate_half`; CosSinRoPE of models/common/rope.py later), GPT-OSS since it came (de335b321 of October 2025).
Llama, DeepSeek and Kimi have complex ones at all of its versions up to b5bcd76c6 (August 2026)."""

_MEGATRON_LOSS = r"\bnanotron\b"
"""Words for frameworks whose loss is Megatron's, whatever else of them is eager (nanotron's `_ShardedCrossEntropy`,
tensor_parallel/functional.py)."""

_OWN_LOSS = ("megatron", "megatron-2021")
"""Stacks that compute the loss kernel by kernel unless they are told otherwise (`_VocabParallelCrossEntropy`, in
Megatron-LM since 2020). `passes` of deepspeed was fitted to runs whose losses were so, and has it in it."""

_NEMO = rf"nemo|{BRIDGE}"
_MEGATRON_FSDP = r"megatron[-_ ]fsdp"
"""Words for Megatron's own FSDP, whose layers are Megatron's (megatron/core/distributed/fsdp)."""

_CUDNN_FIRST = "2026-04"
"""Month from which on runs are taken to have PyTorch 2.11, whose attention calls cuDNN on Hopper and Blackwell."""

_CUDNN_ON_BLACKWELL = "2025-05-14"
"""Date from which on torchtitan asks for cuDNN's attention first on Blackwell (3b85aa31f)."""

_AMPERE = ("a100", "a800")
_HOPPER = ("h100", "h200", "h800", "h20", "gh200")
_BLACKWELL = ("b200", "b300", "gb200", "gb300")

_NVIDIA_KERNELS = "2024"
"""Date before which NeMo ran Megatron-LM's kernels of its time, and hid no communication unless it was told to."""

_PADS_SHAPES = "2024"
"""Date from which on compilers pad the rows of products to multiples of 16 bytes (shape_padding of
torch/_inductor/config.py is on since PyTorch 2.2, and was off in 2.0)."""

_OWN_VOCABULARY = ("fsdp", "fsdp-compiled", "deepspeed-zero3", "llm-foundry")
"""Stacks whose models have the vocabulary that they are told; engines after Megatron-LM pad it."""

_ONCE = r"deep[-_ ]?ep\b|hybrid[-_ ]?ep\b|enable[-_]deepep"
"""Words for exchanges that send a token once to each node (DeepSeek's DeepEP, NVIDIA's HybridEP)."""

_FSDP = r"\bfsdp2?\b|\bdtensor\b|parallelize_module"
"""Words for PyTorch's own parallelism in a row with tensor parallelism."""

_LOOP = (
    r"\b(?:py)?torch\b(?!\.compile)[^;,]*\b(?:ddp|data[- ]parallel)|\bddp\b|distributeddataparallel|\bplain pytorch\b"
)
"""Words for a training loop of PyTorch's own. Where it is compiled its chains are kernels of inductor, as under
compiled FSDP, and none of Megatron's."""

_GRAPHS = r"cuda[-_ ]graphs?"
_STEP_IN_GRAPH = rf"full[-_ ](?:iteration[-_ ])?{_GRAPHS}"
"""Words for CUDA graphs, of parts of blocks where these stand behind (Megatron-Core's `cuda_graph_scope`), or of a step
(`cuda_graph_impl`; FULL_CUDA_GRAPH of MLPerf's NeMo)."""

_EXPERTS_AT_ONCE = r"paged[-_ ]stash|transformer[-_]engine[-_]op[-_]fuser"
"""Words for experts in one kernel of Transformer Engine, which Megatron-LM's paged stash needs
(docs/user-guide/features/paged_stash.md)."""

_FUSED_ROUTER = r"moe[-_]router[-_]fusion"
"""Words for a router of few kernels (Megatron-LM, on Transformer Engine)."""

_SLOW_SINKS = "26.06.01"
"""Container whose notes tell of slow attention with learned sinks, as before 26.06 (issue 256 of cudnn-frontend)."""

MISTRAL_WINDOW = 4096
"""Keys that Mistral 7B looks back at (Jiang et al. 2023, arXiv 2310.06825); from version 0.2 on there is no window."""

_SORTED_ROWS = "2025"
"""Date from which on MindSpeed-LLM sorts rows of tokens by a kernel for whole rows; before, it had the dispatcher of
Megatron-Core 0.6, by default the one that gathers all tokens (`MoEAllGatherTokenDispatcher`)."""

_ALL_TO_ALL = r"dispatcher[-_]type\s*[=: ]\s*\W?alltoall"
"""Words for the dispatcher of Megatron-Core that sends rows to their experts, and only there."""

_GROWING_BUCKETS = {"megatron": "2024-04", "mindspeed": _SORTED_ROWS}
"""Month from which on buckets are larger for more devices (Megatron-Core 0.7: 0fda386c04)."""

_NEMO_2 = "2024-09"
"""Month in which NeMo 2 got its buckets of 128 Mi parameters (1d5de59460)."""

_NEMO_1 = "mlperf training v4.1"
"""Source that used NeMo 1 later (optim@model.optim=distributed_fused_adam in run_and_time.sh of GPT-3)."""


def machine_of_run(row: Row, devices: int, zero: int, notes: list[str]) -> Cluster:
    """The cluster that a row ran on, with the software that it used. Raises `HardwareProfileError`."""
    cluster = machine_as_stated(row, devices, notes)
    return cluster.with_software(software_of(row, cluster, zero, notes)).with_devices(devices)


def software_of(row: Row, cluster: Cluster, zero: int, notes: list[str]) -> Software:
    """The stack of a row, with its attention kernels and overlaps."""
    stack = load_software(_stack(row, zero))
    flags = row.text("other_flags").lower()
    if mentions(named := row.text("stack").lower(), HUGGING_FACE):
        flags = f"{named}; {flags}"
    if stack.name in _TRANSFORMER_ENGINE and stores_fp8(f"{flags}; {row.text('precision_detail').lower()}"):
        stack = replace(stack, gathers_narrow=True)
    elif stack.gathers_narrow and not re.search(_NARROW_GRADIENTS, row.text("source").lower()):
        stack = replace(stack, gathers_narrow=False)  # Transformer Engine, but none of the recipes that ask for it
    stack = _of_its_time(row, _memory_of(row, stack, notes))
    precision = f"{row.precision()}; {row.text('precision_detail').lower()}"
    stack = with_kernels(with_overlaps(stack, flags), flags, notes, row.date(), precision)
    if (stack.name.startswith("fsdp") or gathers_logits(row)) and stack.loss == "whole":
        stack = replace(stack, buffers=stack.buffers + _further_copies(row), composed_loss="pytorch")
    stack = _of_torchtitan(row, stack)
    if mentions(_told(row), _COMPLEX_ROTATIONS) and not mentions(row.text("model").lower(), _REAL_ROTATIONS):
        stack = replace(stack, fuses_chains=False)
    if products_of(row) == "fp8" and stack.name.startswith("fsdp") and gathers_float8(flags):
        stack = replace(stack, gathers_narrow=True)
    attention = _attention(row, stack)
    try:
        if attention != "unfused":
            cluster.device.attention_slowdown(attention)
    except UnknownKeyError:
        attention = "best"
    notes.append(f"taken for {stack.name}, attention {attention}")
    stack = _in_order(row, _dropping(row, stack, attention, notes), attention, notes)
    if attention != "unfused" and _has_alibi(row) and (stack.name == "paddle" or _by_torch(row, attention)):
        stack = replace(stack, biased=True)
        notes.append("ALiBi is a mask that attention reads, and hides nothing from its kernels")
    dropping = f"{row.text('model')}; {flags}; {row.text('notes')}".lower()
    if mentions(dropping, r"token[- ]?drop|moe[-_]expert[-_]capacity[-_]factor"):
        stack = replace(stack, drops_tokens=True)
    stack = _experts_of(row, stack, flags, notes)
    if stack.name in _TRANSFORMER_ENGINE and (graphs := _graphs_by_flags(flags) or stack.graphs) != "none":
        notes.append(f"in CUDA graphs: {graphs}")
        stack = replace(stack, graphs=graphs)
    if stack.name in _OWN_LOSS and (mentions(flags, _MEGATRON_LOSS) or not mentions(flags, _OTHER_LOSS)):
        stack = replace(stack, composed_loss="megatron")
    if says(flags, r"gradient[-_ ]accumulation[-_ ]fusion") is False:
        stack = replace(stack, accumulates=True)
    if re.search(r"mistral-7b(?!.*v0\.[23])", row.text("model").lower()):
        stack = replace(stack, window=MISTRAL_WINDOW)
        notes.append(f"attention in a window of {MISTRAL_WINDOW} keys")
    elif (window := window_of(row)) is not None:
        stack = replace(stack, window=window)
        notes.append(f"attention in a window of {window} keys")
    if _has_sinks(row):
        fast = release_of(row) >= _FUSED_EXPERTS and release_of(row) != _SLOW_SINKS
        slow = 1.0 if fast or mentions(flags, r"flex[- ]?attention") else load_software("nemo").sinks
        stack = replace(stack, has_sinks=True, sinks=slow)
        notes.append(f"attention with learned sinks takes {slow:g} times as long")
    if products_of(row) == "fp8" and stack.name in _TRANSFORMER_ENGINE:
        stack = replace(stack, keeps_fp8=True)
        if not stack.gathers_narrow and stack.name != "llm-foundry":  # which has them of one block at a time
            stack = replace(stack, stored=replace(stack.stored, beside=2.0 * _share_of_blocks(row)))
    detail = row.words("precision", "precision_detail")
    gained = ROWWISE if "rowwise" in detail else MXFP8 if re.search(r"mxf(?:p|loat)8|fp8[-_ ]mx", detail) else 1.0
    if products_of(row) == "fp8" and stack.name.startswith("fsdp") and gained == 1.0:
        stack = replace(stack, gathers_inputs_narrow=gathers_float8(f"{detail}; {flags}"))
    scaled = products_of(row) == "fp8" and stack.name in _TRANSFORMER_ENGINE and _scales_as_they_are(row, detail)
    if scaled:
        notes.append("fp8 with current scaling: the largest element of each operand is found before it is cast")
    return replace(stack, attention=attention, products=products_of(row), gained=gained, current_scaling=scaled)


def _dropping(row: Row, stack: Software, attention: AttentionKernels, notes: list[str]) -> Software:
    """The stack with the dropout that the flags of a row name. `passes` of `megatron-2021` were fitted to runs with
    dropout, and have that of branches in them."""
    flags = row.text("other_flags").lower()
    if mentions(flags, _DROPS_PROBABILITIES):
        if attention == "unfused":
            stack = replace(stack, scores=max(2.0, stack.scores))
        elif (longer := _with_dropout(row, attention)) is not None:
            notes.append(f"dropout: attention takes {longer[0]:g} times as long forward, {longer[1]:g} backward")
            stack = replace(stack, attention_dropout=longer)
        else:
            notes.append("dropout in attention is not priced: no figure of these kernels is known")
    if mentions(flags, _DROPS_BRANCHES) and stack.name != "megatron-2021":
        apart = stack.name not in _TRANSFORMER_ENGINE or says(flags, _FUSED_DROPOUT) is False
        kernel = "a kernel of its own" if apart else "the kernel that adds a branch"
        notes.append(f"dropout of hidden states by {kernel}, whose mask is kept")
        stack = replace(stack, hidden_dropout="apart" if apart else "fused")
    return stack


def _with_dropout(row: Row, attention: AttentionKernels) -> tuple[float, float] | None:
    """How many times longer fused attention takes with dropout, forward and backward; None if that is not known."""
    device = row.text("profile")
    if attention in ("flash1", "flash2", "sdpa") or device.startswith(_AMPERE):
        return _FLASH_DROPOUT
    return _FAST_DROPOUT if device.startswith(_BLACKWELL) else _CUDNN_DROPOUT if device.startswith(_HOPPER) else None


def _in_order(row: Row, stack: Software, attention: AttentionKernels, notes: list[str]) -> Software:
    """The stack with the order in which flags say that the backward pass of attention adds up. On A100 Transformer
    Engine calls no cuDNN then (get_attention_backend: device_compute_capability < (9, 0)), but FlashAttention-2."""
    if attention == "unfused" or not mentions(row.words("other_flags", "flag"), _DETERMINISTIC):
        return stack
    if attention == "flash2" or (attention == "best" and row.text("profile").startswith(_AMPERE)):
        notes.append("deterministic: FlashAttention-2 adds up gradients of queries in one order")
        return replace(stack, ordered=True)
    notes.append("deterministic: what attention takes longer is not priced, as no figure of these kernels is known")
    return stack


_ALIBI = r"\balibi\b"
_WITH_ALIBI = (
    r"(?<![a-z])baichuan[-_ ]?2?[-_ ]?13b(?![a-z0-9])|(?:^|/|(?:run|tune)_)bloomz?(?![a-z]|[-_ ](?:like|style))"
)
"""Words for slopes as positions, and models that have them by their own name, not by a part of it."""


def _has_alibi(row: Row) -> bool:
    """Whether positions are slopes, by what a row says or by its model."""
    named = says(row.words("model", "other_flags", "notes"), _ALIBI)
    return mentions(row.text("model").lower(), _WITH_ALIBI) if named is None else named


def _by_torch(row: Row, attention: AttentionKernels) -> bool:
    """Whether attention is torch's scaled_dot_product_attention, which knows no slopes."""
    return row.text("flash_attention").lower() == "sdpa" or attention == "sdpa"


_PATTERN = r"\bwindow[-_ ]pattern\W+([sl]+)\b"
"""Words for layers in turn that look back at half of a sequence (S) and at all of it (L), the last one at all of it
(nanochat/gpt.py at 348fbb3: _compute_window_sizes)."""


def _same_work(pattern: str, layers: int, sequence: int) -> int:
    """Keys of a window in all layers that leaves attention as much work as windows of a pattern do: one of a share x of
    the keys leaves 2 x - x^2 (`planner.pricing.kernels`)."""
    shares = [0.5 if pattern[at % len(pattern)] == "s" and at < layers - 1 else 1.0 for at in range(layers)]
    work = sum(2 * share - share**2 for share in shares) / max(1, layers)
    return round(sequence * (1 - math.sqrt(1 - work)))


_WINDOW = r"sliding[-_ ]window(?:[-_ ]size)?|\bwindow[-_ ]size\b|\bswa\b"


def window_of(row: Row) -> int | None:
    """Keys that attention looks back at, as flags say; None where they say nothing of a window. Raises RequestError for
    one of unknown length, or of some layers alone."""
    flags = row.words("model", "other_flags")
    if mentions(flags, _PATTERN) and (pattern := re.search(_PATTERN, flags)) is not None:
        return _same_work(pattern[1], row.integer("n_layers") or 0, row.integer("seq_len") or 0)
    if not mentions(flags, _WINDOW):
        return None
    keys = re.search(rf"(?:{_WINDOW})(?: of)?\s*[=: ]\s*(\d{{2,9}})\b", flags)
    if keys is None or re.search(r"alternat|every \w+ layer|global layers|local[-/ ]global", flags):
        raise RequestError("attention has a window in flags: of all layers, and sliding_window=4096, are priced")
    return int(keys[1])


def _scales_as_they_are(row: Row, detail: str) -> bool:
    """Whether products in fp8 use current scaling: rows say so, or are of Megatron Bridge, in fp8 and of no other
    recipe (the "FP8" of its tables is fp8_cs of perf_recipes)."""
    if mentions(detail, r"current[-_ ]scaling|fp8[-_ ]?cs\b|tensorwise"):
        return True
    other = mentions(detail, r"mx|delayed|block|rowwise|nvfp4")
    return not other and of_bridge(row)


def _share_of_blocks(row: Row) -> float:
    """Share of the parameters that are in blocks: embedding and head stay in 16 bits."""
    tables = 2 * (row.integer("vocab") or 0) * (row.integer("hidden") or 0)
    return 1.0 if row.parameters is None else max(0.0, 1 - tables / row.parameters)


def _experts_of(row: Row, stack: Software, flags: str, notes: list[str]) -> Software:
    """The stack with what flags say, or else recipes decide, about experts, and how its dispatcher sorts rows."""
    if mentions(flags, _FUSED_ROUTER):
        stack = replace(stack, routes_fused=True)
    if mentions(flags, _EXPERTS_AT_ONCE):
        stack = replace(stack, fused_experts=True, grouped=0.0)
    sent, moe = _sent_by_flags(flags), row.text("arch").lower() == "moe"
    if moe and stack.name == "nemo" and (release := release_of(row)):
        recipe = recipe_of(row, release)
        sent, stack = sent or recipe.dispatcher, replace(stack, graphs=recipe.graphs)
    if stack.name == "mindspeed" and row.date() < _SORTED_ROWS and sent is None:
        return replace(stack, sorts_elements=True)
    if moe and sent is not None:
        word = "once to a node, whichever experts they go to" if sent == "once" else "for each expert"
        notes.append(f"rows are sent {word}")
        stack = replace(stack, dispatcher=sent)
    return stack


def _sent_by_flags(flags: str) -> Dispatcher | None:
    """How flags say that rows get to their experts."""
    if mentions(flags, _ONCE):
        return "once"
    return "alltoall" if mentions(flags, _ALL_TO_ALL) else None


def _graphs_by_flags(flags: str) -> Graphs | None:
    """What flags say to be in CUDA graphs, by modules of Megatron-Core (`cuda_graph_scope`) or as a whole; None where
    they name neither."""
    if says(flags, _GRAPHS) is False or says(flags, rf"{_GRAPHS}[-_ ]impl") is False:
        return "none"
    if mentions(flags, _STEP_IN_GRAPH) or mentions_of(flags, _GRAPHS, r"\bfull[-_ ]iteration"):
        return "step"
    if mentions_of(flags, _GRAPHS, r"\battn\b(?!\s*[=:])"):
        return "attention"
    return "router" if mentions_of(flags, _GRAPHS, r"\bmoe_(?:router|preprocess)\b") else None


def products_of(row: Row) -> str:
    """The dtype of matrix products where it is not that of the tensors: recipes in fp8 keep all else in bf16."""
    if row.precision() == "fp8":
        return "fp8"
    return "tf32" if mentions(row.text("precision_detail").lower(), "tf32") else ""


def _memory_of(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what a row says of memory: an optimizer on the host, a loss that never holds all logits."""
    words = row.words("other_flags", "distributed_optimizer")
    if mentions(words, r"offload\S* (?:of )?(?:adam|optim)|optimizer[-_ ]offload|offload[-_]optimizer"):
        notes.append("the optimizer's state is on the host")
        stack = replace(stack, offloaded=True)
    recipes = mentions(f"{words}; {row.text('source').lower()}", _NARROW_GRADIENTS)
    told = narrow_gradients(words)
    if told or (recipes and told is None):
        notes.append(f"gradients are kept in bf16, as {'flags say' if told else _RECIPES}")
        states = _narrow_states(row) if recipes else {}
        stack = replace(stack, stored=replace(stack.stored, bf16=2.0, **states))
    if stack.name == "deepspeed-zero3" and not mentions(words, r"grad_accum_dtype\W+(?:fp|float)32"):
        notes.append(
            "gradients are kept and reduced in the dtype of weights, unless data_types.grad_accum_dtype says more"
        )
        stack = replace(stack, stored=replace(stack.stored, bf16=2.0))
    if stack.name == "deepspeed" and row.precision() == "bf16":
        notes.append("gradients are reduced in fp32, in buckets of 500 million")
        stack = replace(stack, buffers=stack.buffers + _flat_gradients(row))
    if stack.name == "paddle" and (row.integer("tp") or 1) > 1:
        stack = replace(stack, copies_inputs=True)
    liger = liger_kernels(words)
    if (mentions(words, _FUSED_LOSS) or "loss" in liger) and stack.name in _OWN_VOCABULARY and stack.loss == "whole":
        notes.append("the loss is one kernel, which leaves its gradient where logits were")
        shifted = 4.0 * _logits(row) if mentions(f"{row.text('stack')}; {words}".lower(), HUGGING_FACE) else 0.0
        stack = replace(stack, loss="in place", buffers=stack.buffers + shifted)
    if mentions(words, _PLAIN_LOSS) and stack.name == "fsdp-compiled":
        notes.append("the loss is not compiled, and has all logits in fp32")
        stack = replace(stack, loss="whole")
    if mentions(words, _HELD_LOGITS):
        notes.append("logits in fp32 are held through the backward pass")
        stack = replace(stack, buffers=stack.buffers + 4.0 * _logits(row))
    if mentions(words, r"\buse[-_ ]cache\b") and row.recomputation() == "full":
        notes.append("outputs hold keys and values of all layers, and logits in fp32 (use_cache)")
        stack = replace(stack, buffers=stack.buffers + _cached(row) + 4.0 * _logits(row))
    if "linear loss" in liger:
        notes.append("the loss is computed a piece at a time (Liger)")
        stack = replace(stack, loss="pieces")
    if "gates" in liger:
        notes.append("gated activations are made again, in place (Liger)")
        stack = replace(stack, fused=True, gates_in_place=True)
    if mentions(words, _CHUNKED_LOSS):
        whole = "torchtitan" in _told(row) and "" < row.date() < _CHUNKED_PROJECTION
        notes.append("the loss is computed a piece at a time" + (", of logits that are whole" if whole else ""))
        stack = replace(stack, loss="in place" if whole else "pieces")
    if says(words, _GATES_OF_MEGATRON) is False:
        notes.append("gates are kept, as flags do without their fusion")
        stack = replace(stack, fused=False)
    return stack


def _of_its_time(row: Row, stack: Software) -> Software:
    """Megatron-LM as it was when a row was measured. Until February 2022 gradients were added up by a pass of their own
    (commit 83b1e42f30: gradient accumulation fusion). From September 2022 (55817ec9b9) to June 2024 (9634c0e4a3) the
    loss left the fp32 copy of the logits in memory while it made the softmax in another. torchtitan did not compile its
    loss from December 18, 2024 (e8977b007) to April 2, 2025 (bbb1b616e)."""
    date, stack = row.date()[:7], _with_its_buckets(row, stack)
    if stack.name == "megatron-2021" and date < _FUSED_ACCUMULATION:
        return replace(stack, accumulates=True)
    if stack.name in ("megatron", "nemo") and _COPIED_LOGITS[0] <= date < _COPIED_LOGITS[1]:
        return replace(stack, loss="whole")
    if stack.name == "fsdp-compiled" and _EAGER_LOSS[0] <= date < _EAGER_LOSS[1] and mentions(_told(row), "torchtitan"):
        return replace(stack, loss="whole")
    return stack


def _of_torchtitan(row: Row, stack: Software) -> Software:
    """The stack with what torchtitan's model and optimizer did when a row was measured; of a row without a date what
    they do."""
    date = row.date()
    if not (date and stack.name.startswith("fsdp") and mentions(_told(row), "torchtitan")):
        return stack
    return replace(stack, foreach=date < _FUSED_ADAM[: len(date)], repeats_keys=date < _GROUPED_QUERIES[: len(date)])


_TORCH_OPTIMIZER = ("fsdp", "fsdp-compiled", "llm-foundry")
"""Stacks whose gradients and updates are those of torch.optim."""

_ONE_KERNEL = (
    r"\bfused[-_ ](?:torch[-_ ])?adamw?\b|adamw?[-_ ](?:torch[-_ ])?fused\b|fused\s*[=:]\s*true|fused optimi[sz]er"
)
"""Words for an update in one kernel, which makes nothing in memory."""


_BUCKET_VIEWS = r"gradients?[-_ ]as[-_ ]bucket[-_ ]views?"
"""Words for gradients that are views of DistributedDataParallel's buckets."""


def as_allocated(row: Row, stack: Software, zero: int, optimizer: str) -> Software:
    """The stack as its tensors come and go: torch.optim sets gradients to None, and PyTorch's cross entropy no longer
    has the logits in 16 bits of which it made a copy in fp32 (`logits = logits.float()` of transformers, `del pred` of
    torchtitan). What an allocator takes of the device has both: its blocks stay, and tensors of other sizes do not fit.

    DistributedDataParallel has buckets of all gradients beside, which always stand (torch/csrc/distributed/c10d/
    reducer.cpp), with states that are shared out (`zero` 1), too, or in place of them (`gradient_as_bucket_view`).
    MosaicML's optimizer goes tensor by tensor (composer/optim/decoupled_weight_decay.py), and an `optimizer` but AdamW
    takes no roots of all second moments.
    """
    data = (row.integer("n_devices") or 1) // ((row.integer("tp") or 1) * (row.integer("pp") or 1))
    buckets = data > 1 and (zero == 0 or (zero == 1 and (row.integer("pp") or 1) == 1))
    if stack.name not in _TORCH_OPTIMIZER:
        return stack
    one_kernel = mentions(_told(row), _ONE_KERNEL) or (mentions(_told(row), "torchtitan") and not stack.foreach)
    buffers = stack.buffers
    if stack.loss != "pieces" and row.precision() != "fp32" and (buffers or stack.composed_loss == "pytorch"):
        buffers -= _FREED_LOGIT * _logits(row)
    roots = stack.name != "llm-foundry" and not one_kernel and optimizer == "adamw"
    views = buckets and mentions(_told(row), _BUCKET_VIEWS)
    stack = replace(stack, frees_gradients=True, roots_moments=roots, buffers=buffers)
    return replace(stack, keeps_buckets=buckets and not views, views_buckets=views)


def _with_its_buckets(row: Row, stack: Software) -> Software:
    """The stack with the buckets that it had when a row was measured; of a row without a date those that it has."""
    date = row.date()[:7]
    if date and date < _GROWING_BUCKETS.get(stack.name, ""):
        return replace(stack, bucket_per_device=0)
    first = (date and date < _NEMO_2) or _NEMO_1 in row.text("source").lower()
    if stack.name == "nemo" and first and (parameters := _nemo_1_bucket(row)):
        return replace(stack, bucket_parameters=parameters)
    return stack


def _nemo_1_bucket(row: Row) -> int:
    """Parameters in a bucket of NeMo 1: those that a device has of a layer, or of a virtual stage where there are any
    (v1.23.0, megatron_gpt_model.py: `distributed_adam_buckets`). 0 where the row does not say how many, or has experts,
    whose gradients are reduced among fewer devices."""
    layers, stages = row.integer("n_layers"), row.integer("vpp") or 1
    if not layers or row.parameters is None or row.text("arch").lower() == "moe":
        return 0
    together = layers / ((row.integer("pp") or 1) * stages) if stages > 1 else 1.0
    return round(row.parameters * _share_of_blocks(row) / layers / (row.integer("tp") or 1) * together)


def _told(row: Row) -> str:
    return row.words("source", "stack", "other_flags", "notes")


def _further_copies(row: Row) -> float:
    """Bytes of logits in fp32 beside the two that `loss` counts: the backward pass of PyTorch's own cross entropy holds
    the softmax, the gradient that nll_loss_backward makes, and that which _log_softmax_backward_data makes of both.
    Where tensor parallel devices share out the words, its loss_parallel adds the exponential of the softmax to such a
    gradient, and has four at once (torch/distributed/tensor/parallel/loss.py: _nll_loss_and_log_softmax_backward)."""
    shared = not gathers_logits(row) and (row.integer("tp") or 1) > 1
    return (2 if shared else 1) * 4.0 * _logits(row)


def _cached(row: Row) -> float:
    """Bytes of keys and values in 16 bits of all layers, which models of transformers return with their logits unless
    `use_cache` is off (its own gradient_checkpointing switches it off, torch's checkpoint_wrapper around layers does
    not). Layers that are not recomputed keep the same for their backward pass."""
    heads = row.integer("n_kv_heads") or row.integer("n_heads") or 0
    size = row.integer("head_dim") or (row.integer("hidden") or 0) / (row.integer("n_heads") or 1)
    tokens = (row.integer("micro_batch") or 1) * (row.integer("seq_len") or 0)
    return 2 * 2.0 * (row.integer("n_layers") or 0) * tokens * heads * size


_FREED_LOGIT = 2.0
"""Bytes of a logit in 16 bits."""


def _logits(row: Row) -> float:
    """Logits of a micro-batch on a device."""
    tokens = (row.integer("micro_batch") or 1) * (row.integer("seq_len") or 0) / (row.integer("cp") or 1)
    tensor = 1 if gathers_logits(row) else row.integer("tp") or 1
    return tokens * (row.integer("vocab") or 0) / tensor


def _flat_gradients(row: Row) -> float:
    """Bytes by which the buffers of Megatron-DeepSpeed are larger in bf16 than in fp16, whose buckets of 16 bits are
    among what devices reserve, as fitted to such runs: gradients in fp32 are copied into a flat tensor of `_BUCKET`
    elements for their reduction (deepspeed/runtime/engine.py: allreduce_bucket). No block that activations have left
    is as large, so that the allocator takes it beside them."""
    shards = (row.integer("tp") or 1) * (row.integer("pp") or 1)
    parameters = (row.parameters or math.inf) / shards
    flat, cast, narrow = 4, 2, 2  # bytes of an element: in fp32, cast for the all-reduce, and in the bucket of fp16
    return (flat + cast - narrow) * min(_BUCKET, parameters)


def _narrow_states(row: Row) -> dict[str, float]:
    """What NVIDIA's recipes keep in less than fp32. In bf16 the lower half of a master weight beside the weight itself:
    NeMo 1 (megatron_base_model.py: store_param_remainders) and Megatron Bridge (use_precision_aware_optimizer), but not
    under FSDP; DeepSeek's moments in Megatron Bridge (deepseek_v3.py: exp_avg_dtype, exp_avg_sq_dtype)."""
    narrow = {}
    bridge = of_bridge(row)
    if row.precision() == "bf16" and row.zero_stage() != 3 and (bridge or row.date() < "2025"):
        narrow["master"] = 2.0
    if bridge and row.zero_stage() != 3 and re.search(r"deepseek|kimi", row.text("model").lower()):
        narrow["moment"] = 2.0
    return narrow


def _stack(row: Row, zero: int) -> str:
    """The stack that a row names, else that of words in its flags and its source, else of words in its notes."""
    if (named := row.stack()) is not None:
        if named in ("fsdp", "pytorch") and row.truth("compile"):  # our runtime by that name compiles nothing
            return "fsdp-compiled"
        if row.text("stack").lower().startswith("megatron-lm"):  # a framework, whose kernels go by the date
            return _megatron(row)
        if re.match(BRIDGE, row.text("stack").lower()) and _fuses_experts(row):
            return "nemo-2606"
        if named == "nemo":
            return _nemo(row)
        return "deepspeed-zero3" if (named, zero) == ("deepspeed", 3) else named
    if row.text("profile").startswith("ascend"):
        return "mindformers" if mentions(row.text("source").lower(), r"mindformers") else "mindspeed"
    for columns in (("source", "other_flags", "distributed_optimizer"), ("notes",)):
        words = row.words(*columns)
        if mentions(words, r"paddle"):
            return "paddle"
        if mentions(words, _MEGATRON_FSDP) and not mentions(words, _NEMO):
            return _megatron(row)
        if mentions(words, r"deepspeed") and not _sharded_by_torch(row):
            return "deepspeed-zero3" if zero == 3 else "deepspeed"
        if zero == 3 and mentions(words, r"llm-foundry|mosaicml"):
            return "llm-foundry"
        if mentions(words, _NEMO):
            return "nemo-2606" if _fuses_experts(row) else _nemo(row)
        if zero != 3 and mentions(words, r"internevo|internlm"):
            return "internevo"
        if zero != 3 and mentions(words, r"transformer engine|\bte\b"):
            return "megatron"
    flags = row.text("other_flags").lower()
    loop = row.truth("compile") and mentions(flags, _LOOP) and not mentions(flags, MEGATRON_WORDS)
    plain = (mentions(flags, HUGGING_FACE) or loop) and not _of_megatron(row)
    if zero == 3 or plain or re.search(r"fsdp|hsdp|shard", row.text("zero_stage").lower()) or row.zero_stage() == 3:
        return "fsdp-compiled" if row.truth("compile") else "fsdp"
    return _megatron(row)


def _of_megatron(row: Row) -> bool:
    """Whether a row names Megatron, whose modules are its own whatever launched them."""
    return mentions(row.words("source", "other_flags"), r"megatron")


def _megatron(row: Row) -> str:
    """Megatron-LM as it was when a row was measured; a row without a date is not from before FlashAttention."""
    fused, date = row.attention(), row.date()
    before = fused in (None, "unfused") and bool(date) and date < "2023"
    return "megatron-2021" if before else "megatron"


def _nemo(row: Row) -> str:
    """NeMo, on Transformer Engine since 2024; before, where attention is not fused, Megatron-LM's kernels of 2022 with
    their dropout of attention (conf/training/gpt3 of NeMo-Framework-Launcher 23.03: transformer_engine False)."""
    early = bool(row.date()) and row.date() < _NVIDIA_KERNELS
    return "megatron-2021" if early and row.attention() == "unfused" else "nemo"


def pads_vocabulary(row: Row) -> bool:
    """Whether a row was run with a vocabulary that was padded, or with products whose rows a compiler pads: not by
    models of PyTorch and Hugging Face that are not compiled. Raises RequestError for a stack that is not known."""
    stack = _stack(row, row.zero_stage() or 0)
    if stack == "deepspeed" and mentions(row.text("other_flags").lower(), HUGGING_FACE) and not _of_megatron(row):
        return False
    return stack not in _OWN_VOCABULARY or bool(row.truth("compile") and row.date() >= _PADS_SHAPES)


def gathers_logits(row: Row) -> bool:
    """Whether tensor parallel devices hold the logits of all words: in Aleph Alpha's framework, and where a row names
    FSDP beside PyTorch's own tensor parallelism (the head is ColwiseParallel(output_layouts=Replicate()),
    pytorch/tutorials intermediate_source/TP_tutorial.rst) but no `loss_parallel`, which torchtitan has by default."""
    if is_aleph_alpha(row):
        return True
    if (row.integer("tp") or 1) == 1 or not _stack(row, row.zero_stage() or 0).startswith("fsdp"):
        return False
    return mentions(_told(row), _FSDP) and not mentions(_told(row), r"torchtitan|loss[-_ ]parallel")


def _sharded_by_torch(row: Row) -> bool:
    """Whether flags name FSDP and not DeepSpeed, so that a title with both is no word for either."""
    flags = row.text("other_flags").lower()
    return mentions(flags, r"\bfsdp2?\b|fully[- ]sharded") and not mentions(flags, r"deepspeed")


def _without_cudnn(row: Row) -> bool:
    """Whether Transformer Engine has no kernel of cuDNN for what a row asks of attention."""
    flags = row.words("other_flags", "flag")
    blackwell = row.text("profile").startswith(_BLACKWELL)
    return blackwell and mentions(flags, _DETERMINISTIC) and mentions(flags, _DROPS_PROBABILITIES)


def _fuses_experts(row: Row) -> bool:
    """Whether the recipe of Megatron Bridge for experts in fp8 fuses kernels: on GB200, GB300 and, but for GPT-OSS,
    on B300 (perf_recipes at 067f987d)."""
    if row.text("arch").lower() != "moe" or row.precision() != "fp8" or release_of(row) < _FUSED_EXPERTS:
        return False
    if _graphs_by_flags(row.text("other_flags").lower()) in ("router", "attention"):
        return False
    return row.text("profile").startswith(("gb", "vr") if _has_sinks(row) else ("gb", "vr", "b300"))


def _has_sinks(row: Row) -> bool:
    return bool(re.search(r"gpt[-_ ]?oss", row.text("model").lower()))


def _attention(row: Row, stack: Software) -> AttentionKernels:
    named, date = row.attention(), row.date()
    own = "sdpa" if stack.attention == "cudnn" else stack.attention
    by_torch = row.text("flash_attention").lower() == "sdpa" or (own == "sdpa" and named in (None, "fused"))
    if by_torch and row.latent:
        return "flash1"  # the memory-efficient kernel: others want values as wide as keys (sdp_utils.cpp of PyTorch)
    blackwell = row.text("profile").startswith(_BLACKWELL)
    first = _CUDNN_ON_BLACKWELL if blackwell and mentions(_told(row), "torchtitan") else _CUDNN_FIRST
    if by_torch and date >= (first if len(date) > len("2025-05") else first[:7]) and row.precision() != "fp32":
        return "cudnn"
    if row.precision() == "fp32" and own != "sdpa":
        return (
            "unfused"  # FlashAttention takes 16 bits alone (flash_attn_interface.py); PyTorch has other fused kernels
        )
    if named == "unfused" or (named is None and own == "unfused"):
        return "unfused"
    if named == "latest":
        return "flash2" if _without_cudnn(row) else "best"
    if named in ("flash1", "flash2"):
        return named
    if stack.name == "internevo":
        return "flash2"
    if not date or date >= _THIRD or row.text("profile").startswith("ascend"):
        return "best" if own == "unfused" else own
    return "flash2" if date >= _SECOND or stack.name == "nemo" else "flash1"
