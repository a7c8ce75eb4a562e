"""Classes of operators and of kernels, by the names that PyTorch and its profiler give them."""

import re

_PRODUCTS = "matmul", ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "dot", "_scaled_mm", "_grouped_mm")
"""Whole words: mm is in many names."""

_ATEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")),
    ("recurrent", ("lstm", "gru", "rnn_", "mkldnn_rnn", "_cudnn_rnn", "_thnn_fused")),
    _PRODUCTS,
    ("matmul", ("convolution", "conv_", "conv2d", "conv3d", "conv_depthwise2d", "conv_depthwise3d")),
    ("cross_entropy", ("log_softmax", "nll_loss", "cross_entropy")),
    ("normalisation", ("native_layer_norm", "layer_norm", "rms_norm", "batch_norm", "group_norm", "softmax")),
    ("embedding", ("embedding", "index_select", "index_add", "index_put")),
    ("optimizer", ("_fused_adam", "_foreach", "_fused_sgd")),
    ("copy", ("copy_", "clone", "cat", "stack", "contiguous", "_to_copy", "split_with_sizes_copy", "fill_", "zero_")),
    ("copy", ("index", "gather")),
)
"""Beginnings of the names of ATen operators, by class, the first that fits; any other is elementwise."""

Patterns = tuple[tuple[str, re.Pattern[str]], ...]


def _patterns(*pairs: tuple[str, str]) -> Patterns:
    """Names, each with what is looked for."""
    return tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in pairs)


_KERNELS = _patterns(
    ("optimizer", r"multi_?tensor"),  # first: one that takes norms, of gradients
    ("delta_rule", r"delta_rule|_kda_|_dqkwg|chunk_fwd_kernel_o|_wy_|recompute_w_u|solve_tril|l2norm"),
    ("state_space", r"_chunk_(scan|state|cumsum)_|_state_passing_|_bmm_chunk_"),
    ("selective_scan", r"selective_scan"),
    ("attention", r"flash|fmha|sdpa|attention|_mha_"),
    ("recurrent", r"lstm|gru_|rnn_"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|cijk_|matmul|splitk|_mm_|mma_|convolve|conv[23]d|winograd|[dw]grad_"),
    ("cross_entropy", r"cross_?entropy|softmax|nll_?loss|logsumexp"),
    ("normalisation", r"norm|welford|ln_(fwd|bwd)|rms"),
    ("embedding", r"embedding|index_?select|index_?put|indexing_backward|gather_kernel|scatter_kernel"),
    ("optimizer", r"adam|_sgd|foreach|lamb"),
    ("copy", r"memcpy|memset|copy|catarray|_cat_|transpose|permute|fillfunctor"),
)
"""What names of kernels have in them, by class, the first that fits; any other is elementwise."""

_COLLECTIVES = _patterns(
    ("all_reduce", r"all_?reduce"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|alltoall|deep_?ep|hybrid_?ep"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|(?<![a-z])i?send(?![a-z])|(?<![a-z])i?recv(?![a-z])"),
    ("reduce", r"reduce"),
)
_LIBRARY = re.compile(r"nccl|rccl|hccl|hcom_|gloo:|deep_?ep|hybrid_?ep", re.IGNORECASE)
_OTHER = "elementwise"


def class_of_operator(name: str) -> str:
    """The class of an ATen operator, by its name without "aten::"."""
    for op_class, starts in _ATEN:
        if any(name == start or name.startswith((f"{start}_", f"{start}.")) or name == f"_{start}" for start in starts):
            return op_class
        if (op_class, starts) != _PRODUCTS and any(start in name for start in starts):
            return op_class
    return _OTHER


def class_of_kernel(name: str) -> str:
    """The class of a kernel of a device, by its name; not of a collective."""
    return next((op_class for op_class, pattern in _KERNELS if pattern.search(name)), _OTHER)


def collective_of(name: str, said: str = "") -> str | None:
    """The kind of a collective, by the name of its kernel and by what the profiler `said` of it ("Collective name");
    None for what is no collective. An unknown one is "other"."""
    if not said and not _LIBRARY.search(name):
        return None
    for text in filter(None, (said, name)):
        for kind, pattern in _COLLECTIVES:
            if pattern.search(text):
                return kind
    return "other"
