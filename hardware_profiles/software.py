"""How software runs what a plan leaves open: facts that change seconds and bytes, not results."""

from dataclasses import dataclass
from typing import Literal

from hardware_profiles.units import Bytes, Seconds

AttentionKernels = Literal["best", "cudnn", "sdpa", "flash2", "flash1", "unfused"]
"""The fastest of the device, what `scaled_dot_product_attention` of PyTorch calls there (2.11 on Hopper: cuDNN; before:
"sdpa"), the second or first generation of FlashAttention, or score matrices in memory."""


_FP32 = 4  # bytes of a gradient

Dispatcher = Literal["alltoall", "once"]
"""How rows of tokens get to their experts: one row for each expert of a token, or one for each device (or node, where
they are on several) that has any of them, summed up there before it comes back (DeepEP, HybridEP)."""

Graphs = Literal["none", "router", "attention", "step"]
"""What of a block with experts is in CUDA graphs, which the host launches at once: the router and what sorts rows for
their exchange; all that is not of the experts; or all."""

ComposedLoss = Literal["", "megatron", "pytorch"]
"""A cross entropy in one kernel, or in the kernels of Megatron-LM, or of PyTorch."""

HiddenDropout = Literal["none", "fused", "apart"]
"""Whether branches are dropped before they are added to the residual stream, and by which kernel."""

LossMemory = Literal["whole", "in place", "pieces"]
"""What of logits stands in memory: them, their fp32 copy and its softmax; the softmax in place of the fp32 copy, and
the gradient in place of the softmax (Megatron-LM); or a piece at a time, fused with the projection (Liger)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Shares of communication, in [0, 1], that computation hides: 0 waits for all of it. Of activations (`tensor`), of
    parameters that are gathered for use or after the update (`gathers`), of gradients (`reductions`), and of the pieces
    that come round a ring (`ring`), which run while the piece that is there is computed with wherever rings are run;
    and of rows on their way to experts and back (`exchange`)."""

    tensor: float = 0.0
    gathers: float = 0.0
    reductions: float = 0.0
    ring: float = 1.0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Bytes per parameter that a stack keeps where it trains in 16 bits. In fp32 weights, gradients and moments have 4
    bytes and there is no master weight.

    `weight` 2, or 4 where the fp32 master weight is what is stored and a 16-bit copy is made for its use. `fp16` and
    `bf16`: the gradient, of each dtype, 6 where it is kept in 16 bits and added up in fp32 beside that. `master`: the
    fp32 weight, 0 where that is the stored one. `update`: gradients in fp16 that the optimizer copies together or casts
    while it steps, for each parameter that a device updates. `moment`: each moment of the optimizer. `beside`:
    copies of the weight that stay beside it, sharded as it is (Transformer Engine's fp8 weights, also transposed).
    """

    weight: Bytes = 2
    fp16: Bytes = 4
    bf16: Bytes = 4
    master: Bytes = 4
    update: Bytes = 0
    moment: Bytes = 4
    beside: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A training stack.

    Attributes:
        name: of the stack.
        passes: how often the bytes of elementwise work, norms and losses pass through memory, in units of one kernel
            for each operator of the graph: more where casts, bias and dropout are kernels of their own, less where a
            compiler fuses chains.
        composed_loss: whose kernels compute the loss one after the other, in fp32, instead of one for all.
        composed_norms: whether RMS norms are chains of PyTorch operators, in fp32, instead of one kernel each
            (`LlamaRMSNorm` of transformers).
        host: what the host takes to launch an operator, in units of `Device.host_latency`.
        attention: which attention kernels.
        scores: with unfused attention, how many elements are kept for the backward pass of each score: 1 is the
            softmax, 2 what dropout makes of it too, and its mask of a byte.
        whole_blocks: whether recomputation runs a block to its end (Megatron), or only until all that its backward
            pass needs is there (torch's checkpoint).
        communicators: share of the process groups, whose buffers `Device.reserved` counts, that it creates.
        modules: whether selective recomputation runs modules of a block again, their inputs saved (Megatron's
            --recompute-modules), so that nothing outside of them is computed or moved again; else the block is run
            again but for the results that it keeps (torch's selective checkpoint).
        accumulates: whether adding up gradients is a pass of its own, or done by the kernel of the weight gradient.
        sums_narrow: whether gradients are added up in the dtype of their weights (autograd), whatever dtype they are
            reduced in.
        hidden: communication that computation hides.
        products: dtype in which matrix products are computed, as "fp8" or "tf32"; empty: that of their operands.
        keeps_fp8: whether products in fp8 keep of their operands the fp8 copies that they have multiplied, not what
            those were made of (Transformer Engine).
        gained: share that is left of what products in fp8 save, where each row of an operand has a scale of its own.
        bucket: bytes of parameters or gradients that are sent together; 0 sends each tensor by itself.
        bucket_parameters: how many parameters, or their gradients, are sent together, in software that counts these
            (Megatron-Core); it cuts its buffers into buckets only where reductions overlap the backward pass.
        bucket_per_device: as many for each device of the group, where that is more.
        stored: bytes kept for each parameter.
        fused: whether the results of elementwise operators whose operands are kept anyway are made again in the
            backward pass (fused SwiGLU, compilers) instead of kept.
        fuses_chains: whether a rotation by rotary positions is one kernel, and a gated activation with its product
            another (compilers, Liger), each with its passes over memory alone.
        ahead: where weights are gathered for their use, how many blocks at the same time; 0 gathers each weight by
            itself.
        copies_out: whether weights that were gathered together are copied out of the buffer that came, and gradients
            into the one that leaves (FSDP2).
        rearranges: whether what is gathered or scattered along the sequence is copied from or into the order of
            devices, as the first dim is the batch (`torch.cat` in torch/distributed/_functional_collectives.py).
        regathers: whether a value that is gathered for its use is kept in pieces, and gathered again in the backward
            pass, instead of whole (sequence parallelism of Korthikanti et al. 2022, section 4.2.2).
        recomputed_in_backward: classes of operators that are computed again for their own backward pass, and keep
            nothing beside their operands and results: ("attention",) is selective recomputation of Korthikanti et al.
            2022.
        buffers: bytes of buffers for communication that are there all the time.
        loss: what of logits stands in memory.
        peak_low, peak_high: between which shares of the predicted peak of a device peaks were measured, of nine runs in
            ten; the latter is what a plan leaves free for the error of its prediction.
        offloaded: whether gradients and the optimizer's state live in the memory of the host.
        offloads_inputs: whether blocks that offload what they save do so with what flows into them, too (Transformer
            Engine's cpu_offload).
        remakes: what is made again in the backward pass from what is kept anyway, at next to no cost (Megatron's
            recompute-modules layernorm and moe_act): "normalisation" the results of norms, "experts" the activations
            of experts.
        views_heads: whether attention stores heads as the projection behind it reads them, so that both keep the same
            memory (modules of transformers). Queries, keys and values of one projection are views of what that makes,
            all of which stays for the values, so that frameworks with such keep as much as if heads were copied.
        copies_inputs: whether tensor-parallel products each keep a copy of their own of what they read together
            (PaddlePaddle, phi/kernels/impl/c_identity_kernel_impl.h: a copy for every ColumnParallelLinear).
        gates_in_place: whether elementwise kernels write gradients over the operands that they have kept (Liger's gated
            activations).
        grouped: seconds that the product of each expert takes beside, where they are launched one by one; 0 where one
            kernel computes those of all experts.
        current_scaling: whether operands of products in fp8 have the scale of their own largest element, which a kernel
            finds before another casts them (Transformer Engine csrc/extensions/normalization.cpp: a norm computes in 16
            bits, `nvte_compute_amax`, then quantises), so that none is written in fp8 by what makes it.
        gathers_narrow: whether weights of products in fp8 are gathered in fp8.
        gathers_inputs_narrow: whether what products in fp8 read, and gradients of their results, are in fp8 before
            tensor parallel devices gather them (torchao's Float8ColwiseParallel and Float8RowwiseParallel).
        dispatcher: how rows get to their experts.
        fused_experts: whether one kernel multiplies the rows of all experts, activates them, and brings operands into
            fp8 on the way.
        routes_fused: whether Transformer Engine's kernels choose experts and compute the auxiliary loss
            (moe-router-fusion of Megatron-LM).
        sinks: how many times longer attention with learned sinks takes than the same without.
        has_sinks: whether attention has learned sinks.
        window: keys that a query looks back at most at in every layer, which kernels make use of; 0: all.
        biased: whether fused attention reads a bias for every score (ALiBi as `attn_mask`), which stands in memory, and
            leaves out nothing of what causality masks, as the mask is part of it.
        attention_dropout: how many times longer fused attention takes with dropout of its probabilities, forward and
            backward.
        ordered: whether the backward pass of FlashAttention-2 adds up gradients of queries in one order
            (`planner.pricing.ordered_attention`).
        hidden_dropout: whether a branch is dropped where it joins the residual stream: not at all, by the kernel that
            adds it (Megatron's bias_dropout_fusion), or by one of its own.
        drops_tokens: whether rows beyond the capacity of an expert are dropped, so that all shapes are known before.
        sorts_elements: whether rows are brought to experts and added up element by element, with an index for each.
        graphs: what of blocks with experts is in CUDA graphs.
        softmax_heads: with unfused attention, of how many heads, each of a sample, the heads of a device must be a
            multiple for its fused softmax; of others PyTorch computes it in fp32, kernel by kernel.
        casts: share of the operands of products in fp8 that a kernel of its own brings there in the forward pass; the
            others are written so by the norm or the activation before. Gradients always take a kernel.
        scatter_gather: whether a pipeline stage sends a part of its result from each device that holds all of it, and
            the next one gathers it (Megatron-LM's --scatter-gather-tensors-in-pipeline, Narayanan et al. 2021, section
            4.1; pipe_partitioned of DeepSpeed), instead of all from each.
        waits_to_send: whether a stage computes no further before its result has arrived at the next one.
        adds: whether the kernels of weight gradients add to the gradient that is kept of a step (Megatron's main
            gradient).
        exchanges_at_once: whether rows go to experts by one all-to-all among all devices that share these out, not by
            one along each axis of the mesh.
        owns_whole: whether its ZeRO 1 shares optimizer states out by whole parameters: gradients are all-reduced, and
            each owner broadcasts what it has updated.
        sums_biases: whether gradients of biases are sums over all rows that take a kernel of their own (autograd), not
            the epilogue of another product (Transformer Engine).
        repeats_keys: whether keys and values are copied for every query head before attention.
        looks_first: whether the largest elements of blocks of fp8 are found by a kernel before that which casts them,
            not by the same.
        expert_by_expert: whether products of experts in fp8 are launched one expert after the other, also where one
            kernel computes those of all experts in 16 bits.
        counts_gradients: whether `host` is of every kernel that autograd launches, also of those for gradients and for
            their sums, and of what is done for each parameter in an update; else of one for an operator of the graph in
            each pass, as it was fitted.
        composes_scans: whether scans are PyTorch's operators on GPUs, too, as where the packages with their kernels are
            not installed; elsewhere they are in any case.
        foreach: whether the optimizer is a chain of operators, each over all tensors (`foreach` of torch.optim), not
            one kernel.
        frees_gradients: whether gradients have no memory between an update and the backward pass that makes them anew
            (torch.optim's zero_grad(set_to_none=True)).
        keeps_buckets: whether buckets of all gradients stand beside them (DistributedDataParallel, unless it has
            gradient_as_bucket_view). Counts with `frees_gradients`.
        views_buckets: whether gradients are views of such buckets, which stand in their place. Counts likewise.
        autocasts: whether weights are gathered in fp32 and rounded where they are used, and blocks hand on values in
            fp32 (torch.autocast around FSDP without MixedPrecision: products alone make 16 bits).
        roots_moments: whether the optimizer makes the roots of all second moments at once, in memory of their own
            (torch.optim's _multi_tensor_adam, its default on GPUs: `exp_avg_sq_sqrt`). Counts with `frees_gradients`.
    """

    name: str
    passes: float
    host: float
    attention: AttentionKernels
    scores: float
    whole_blocks: bool
    accumulates: bool
    hidden: Hidden
    bucket: Bytes
    bucket_parameters: int = 0
    bucket_per_device: int = 0
    products: str = ""
    keeps_fp8: bool = False
    gained: float = 1.0
    stored: Stored = Stored()
    fused: bool = False
    ahead: int = 0
    copies_out: bool = False
    rearranges: bool = False
    modules: bool = False
    communicators: float = 1.0
    regathers: bool = False
    recomputed_in_backward: tuple[str, ...] = ()
    buffers: Bytes = 0.0
    loss: LossMemory = "whole"
    offloaded: bool = False
    offloads_inputs: bool = False
    remakes: tuple[str, ...] = ()
    copies_inputs: bool = False
    gates_in_place: bool = False
    peak_low: float = 1.0
    peak_high: float = 1.0
    grouped: Seconds = 0.0
    adds: bool = False
    casts: float = 1.0
    gathers_narrow: bool = False
    gathers_inputs_narrow: bool = False
    dispatcher: Dispatcher = "alltoall"
    fused_experts: bool = False
    sinks: float = 1.0
    has_sinks: bool = False
    window: int = 0
    biased: bool = False
    attention_dropout: tuple[float, float] = (1.0, 1.0)
    ordered: bool = False
    hidden_dropout: HiddenDropout = "none"
    drops_tokens: bool = False
    softmax_heads: int = 1
    graphs: Graphs = "none"
    sorts_elements: bool = False
    scatter_gather: bool = False
    waits_to_send: bool = False
    composed_loss: ComposedLoss = ""
    composed_norms: bool = False
    current_scaling: bool = False
    exchanges_at_once: bool = False
    owns_whole: bool = False
    routes_fused: bool = False
    sums_narrow: bool = False
    sums_biases: bool = False
    repeats_keys: bool = False
    looks_first: bool = False
    foreach: bool = False
    expert_by_expert: bool = False
    counts_gradients: bool = False
    composes_scans: bool = False
    frees_gradients: bool = False
    keeps_buckets: bool = False
    views_buckets: bool = False
    roots_moments: bool = False
    autocasts: bool = False
    fuses_chains: bool = False
    views_heads: bool = False

    @property
    def has_buckets(self) -> bool:
        """Whether it sends several tensors together."""
        return bool(self.bucket or self.bucket_parameters)

    @property
    def one_bucket(self) -> bool:
        """Whether all that is sent once a step is in one bucket: where reductions do not overlap the backward pass,
        Megatron-Core sets bucket_size = None (distributed_data_parallel.py), and Megatron-LM before it had no other."""
        return bool(self.bucket_parameters) and not self.hidden.reductions

    def bucket_bytes(self, devices: int, element: Bytes) -> Bytes:
        """Bytes of a full bucket in a group of so many devices, with elements of so many bytes."""
        return self.bucket or element * max(self.bucket_parameters, self.bucket_per_device * devices)

    @property
    def counts_rows(self) -> bool:
        """Whether the host must know how many rows each expert gets before it launches what computes them: products of
        experts are launched one by one, or in one call that takes their sizes, and no capacity sets these before."""
        return bool(self.grouped) and not self.drops_tokens

    def adds_in_fp32(self, dtype: str) -> bool:
        """Whether the kernel of a weight gradient adds it to one in fp32 (Megatron's main gradients)."""
        kept = {"bf16": self.stored.bf16, "fp16": self.stored.fp16}.get(dtype, 0.0)
        return self.adds and not self.accumulates and kept >= _FP32


PYTORCH = Software(
    name="pytorch",
    passes=1.0,
    host=1.5,
    attention="cudnn",
    scores=0.0,
    whole_blocks=False,
    accumulates=True,
    hidden=Hidden(),
    bucket=0.0,
    sums_biases=True,
    looks_first=True,
    expert_by_expert=True,
    counts_gradients=True,
)
"""The operators of the graph one by one, as `runtime` executes them: nothing is fused, hidden or sent together. The
host takes 21 us for each kernel, where PyTorch by hand takes 12.8 to 15.9 (docs/device.md)."""
