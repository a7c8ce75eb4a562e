"""How training software runs what a plan leaves open: facts that change seconds and bytes, but not results."""

from dataclasses import dataclass
from typing import Literal

from hardware_profiles.units import Bytes, Seconds

AttentionKernels = Literal["best", "cudnn", "sdpa", "flash2", "flash1", "unfused"]
"""Attention kernels: the device's fastest; those that PyTorch's `scaled_dot_product_attention` calls (2.11 on Hopper:
cuDNN; before: "sdpa"); FlashAttention 2 or 1; or unfused, with score matrices in memory."""


_FP32 = 4  # bytes of a gradient

Dispatcher = Literal["alltoall", "once", "allgather"]
"""How rows of tokens reach their experts: one row for each expert of a token; or one row for each device (or node, if
experts are on several nodes) that has any of them, summed up there before it returns (DeepEP, HybridEP); or every
device gathers all tokens, and the results of its experts are reduce-scattered (`MoEAllGatherTokenDispatcher`)."""

Graphs = Literal["none", "router", "attention", "step"]
"""The part of a block with experts that is in CUDA graphs, which the host launches at once: the router and the sorting
of rows for their exchange; everything but the experts; or everything."""

ComposedLoss = Literal["", "megatron", "pytorch", "pytorch-16", "inductor", "llm.c"]
"""A cross entropy in one kernel (empty), or in the kernels of Megatron-LM or of PyTorch, with logits in fp32 or in 16
bits, or of a compiler."""

HiddenDropout = Literal["none", "fused", "apart"]
"""Whether branches are dropped out before they are added to the residual stream, and by which kernel."""

LossMemory = Literal["whole", "in place", "pieces"]
"""How much memory logits take. "whole": logits, their fp32 copy and its softmax. "in place": the softmax replaces the
fp32 copy, and the gradient replaces the softmax (Megatron-LM). "pieces": one piece at a time, fused with the projection
(Liger)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Shares of communication, in [0, 1], that overlap with computation; 0: all of it is exposed.

    Attributes:
        tensor: collectives of activations.
        gathers: all-gathers of parameters for their use or after the update.
        reductions: reductions of gradients.
        ring: pieces that move along a ring, which overlap the computation with the current piece wherever rings run.
        exchange: rows on their way to experts and back.
    """

    tensor: float = 0.0
    gathers: float = 0.0
    reductions: float = 0.0
    ring: float = 1.0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Bytes per parameter that a stack keeps in 16-bit training.

    In fp32 weights, gradients and moments have 4 bytes each, and there is no master weight.

    Attributes:
        weight: 2, or 4 if the fp32 master weight is stored and a 16-bit copy is made for each use.
        fp16: the gradient with fp16; 6 if it is kept in 16 bits and accumulated in fp32 beside that.
        bf16: the gradient with bf16; otherwise as `fp16`.
        master: the fp32 weight; 0 if that is the stored one.
        update: gradients in fp16 that the optimizer copies together or casts during its step, for each parameter that a
            device updates.
        moment: each moment of the optimizer.
        beside: additional copies of the weight, sharded as it is (Transformer Engine's fp8 weights, also transposed).
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
            for each operator of the graph. It is higher if casts, bias and dropout are kernels of their own, lower if a
            compiler fuses chains.
        composed_loss: whose kernels compute the loss one after the other, in fp32, instead of one kernel for all of it.
            Those that a compiler makes ("inductor") read logits as they are, without a cast before, as do PyTorch's of
            a model whose logits stay in 16 bits ("pytorch-16"); that of llm.c writes the gradient over them at once.
        composed_norms: whether RMS norms are chains of PyTorch operators, in fp32, instead of one kernel each
            (`LlamaRMSNorm` of transformers).
        composed_gelu: whether GELU is a chain of PyTorch operators, not one kernel (`gelu_new` of transformers).
        host: time of the host to launch an operator, in units of `Device.host_latency`.
        engine_launches: whether operators outside of experts are launched as Megatron-Core's layers launch them
            (`planner.pricing.kernels.engine_launches`), not once for each operator of the graph in either pass; its
            collectives are launched, too.
        attention: which attention kernels.
        scores: with unfused attention, how many elements per score are kept for the backward pass: 1 is the softmax, 2
            adds its result after dropout, and a mask of one byte comes on top.
        whole_blocks: whether recomputation runs a block to its end (Megatron), or stops when all that its backward pass
            needs is there (torch's checkpoint).
        communicators: share of the process groups that the stack creates; `Device.reserved` counts the buffers of all.
        modules: whether selective recomputation reruns modules of a block whose inputs are saved (Megatron's
            --recompute-modules), so that nothing outside them is recomputed or communicated again. Else the whole block
            is rerun, except for the results that it keeps (torch's selective checkpoint).
        accumulates: whether the accumulation of gradients is a pass of its own, and not part of the weight gradient's
            kernel.
        sums_narrow: whether gradients are accumulated in the dtype of their weights (autograd), whatever dtype they are
            reduced in.
        hidden: communication that overlaps with computation.
        products: dtype of matrix products, as "fp8" or "tf32"; empty: that of their operands.
        keeps_fp8: whether fp8 products keep the fp8 copies of their operands for the backward pass, and not the
            operands (Transformer Engine).
        gained: share of the time saved by fp8 products that remains if each row of an operand has a scale of its own.
        bucket: bytes of parameters or gradients that are sent together; 0 sends each tensor by itself.
        bucket_parameters: number of parameters, or of their gradients, that are sent together, in software that counts
            these (Megatron-Core); it cuts its buffers into buckets only if reductions overlap the backward pass.
        bucket_per_device: number of parameters per device of the group, if that gives a larger bucket.
        stored: bytes kept for each parameter.
        fused: whether results of elementwise operators whose operands are kept anyway are recomputed in the backward
            pass (fused SwiGLU, compilers) instead of kept.
        fuses_chains: whether a rotary embedding is one kernel, and a gated activation with its product another
            (compilers, Liger), each passing over memory once.
        ahead: how many blocks' weights are gathered for use at the same time; 0 gathers each weight by itself.
        copies_out: whether gathered weights are copied out of the receive buffer, and gradients into the send buffer
            (FSDP2).
        rearranges: whether tensors that are gathered or scattered along the sequence are copied from or into device
            order, because the first dim is the batch (`torch.cat` in torch/distributed/_functional_collectives.py).
        regathers: whether a value that is gathered for use is kept sharded and regathered in the backward pass, not
            kept whole (sequence parallelism of Korthikanti et al. 2022, section 4.2.2).
        recomputed_in_backward: classes of operators that are recomputed for their own backward pass and keep only their
            operands and results: ("attention",) is selective recomputation of Korthikanti et al. 2022.
        buffers: bytes of communication buffers that exist all the time.
        loss: how much memory logits take.
        peak_low, peak_high: nine of ten measured peaks lie between these shares of the predicted peak; a plan leaves
            free what the prediction may be too low by, according to the latter.
        offloaded: whether gradients and optimizer states live in host memory.
        offloads_inputs: whether blocks that offload what they save also offload their inputs (Transformer Engine's
            cpu_offload).
        remakes: what the backward pass recomputes from values that are kept anyway, almost free (Megatron's
            recompute-modules layernorm and moe_act): "normalisation" the results of norms, "experts" the activations of
            experts.
        views_heads: whether attention stores heads in the layout that the projection after it reads, so that both keep
            the same memory (modules of transformers). Queries, keys and values of one projection are views of its
            result, which stays as a whole for the values. So frameworks with such a projection keep as much as if heads
            were copied.
        copies_inputs: whether tensor-parallel products each keep their own copy of an input that they share
            (PaddlePaddle, phi/kernels/impl/c_identity_kernel_impl.h: a copy for every ColumnParallelLinear).
        gates_in_place: whether elementwise kernels write gradients over the operands that they have kept (Liger's gated
            activations).
        grouped: extra seconds per expert if the products of experts are launched one by one; 0 if one kernel computes
            all.
        grouped_slower: how many times longer a kernel for the 16-bit products of all experts takes than products of
            these shapes in the tables of kernels.
        current_scaling: whether operands of fp8 products are scaled by their own largest element. A kernel finds it
            before another one casts them (Transformer Engine csrc/extensions/normalization.cpp: a norm computes in 16
            bits, `nvte_compute_amax`, then quantises), so the kernel that makes an operand never writes it in fp8.
        gathers_narrow: whether weights of fp8 products are gathered in fp8.
        gathers_inputs_narrow: whether inputs of fp8 products, and gradients of their results, are cast to fp8 before
            tensor-parallel devices gather them (torchao's Float8ColwiseParallel and Float8RowwiseParallel).
        dispatcher: how rows reach their experts.
        buffers_of_experts: (tokens of a sequence, rows of an expert's buffer over the average), if products with masks
            bring the tokens of each sequence into buffers of a fixed size for every expert, and back (GShard).
        fused_experts: whether one kernel multiplies the rows of all experts, applies the activation, and casts operands
            to fp8.
        routes_fused: whether Transformer Engine's kernels choose experts and compute the auxiliary loss
            (moe-router-fusion of Megatron-LM).
        sinks: how many times longer attention takes with learned sinks than without.
        has_sinks: whether attention has learned sinks.
        window: the most keys that a query attends to in every layer, which kernels make use of; 0: all.
        biased: whether fused attention reads a bias for every score (ALiBi as `attn_mask`). The bias is in memory;
            causal masking then saves no work, because the mask is part of the bias.
        masked: whether fused attention reads a mask of padding from memory (`attn_mask`), one for all heads. Causal
            masking then saves no work, because it is part of the mask.
        drops_probabilities: whether all attention drops probabilities, also where the model has no such dropout.
        ordered: whether the backward pass of FlashAttention-2 adds up gradients of queries in a fixed order
            (`planner.pricing.kernels.ordered_attention`).
        hidden_dropout: dropout of a branch where it joins the residual stream: none, in the kernel that adds the branch
            (Megatron's bias_dropout_fusion), or in a kernel of its own.
        drops_tokens: whether rows beyond the capacity of an expert are dropped, so that all shapes are known in
            advance.
        row_bytes: bytes for each element of the rows of experts that move in the forward and the backward pass beyond
            the copies of `costmodels.kernels.experts`.
        graphs: the part of blocks with experts that is in CUDA graphs.
        masks_apart: with unfused attention, whether scaling and masking of the scores are kernels of their own, beside
            the softmax (PyTorch's operators).
        softmax_heads: with unfused attention, the fused softmax needs a multiple of this many (sample, head) pairs on a
            device. Otherwise PyTorch computes it in fp32, kernel by kernel.
        casts: share of the operands of fp8 products that a kernel of its own casts in the forward pass; the others are
            written in fp8 by the norm or the activation before. Gradients always take a kernel.
        scatter_gather: whether each of the devices that hold a stage's whole result sends a part of it, and the next
            stage gathers the parts (Megatron-LM's --scatter-gather-tensors-in-pipeline, Narayanan et al. 2021, section
            4.1; pipe_partitioned of DeepSpeed), instead of each sending all of it.
        waits_to_send: whether a stage waits until the next one has received its result.
        adds: whether kernels of weight gradients add to the gradient kept for the step (Megatron's main gradient).
        exchanges_at_once: whether rows go to experts by one all-to-all among all devices that share the experts, not by
            one along each axis of the mesh.
        exchanges_parts: whether devices that have parts of the width of the same experts exchange each a part of the
            rows, and gather them afterwards, instead of each exchanging all of them.
        owns_whole: whether its ZeRO 1 shards optimizer states by whole parameters: gradients are all-reduced, and each
            owner broadcasts the parameters that it has updated.
        copies_gradients: how many kernels of their own copy a whole gradient on its way into a reduce-scatter, reading
            and writing it; 0: as `copies_out` says.
        reduces_whole: whether gradients of which each device keeps a part are all-reduced nevertheless (ZeRO 1 and 2 of
            DeepSpeed).
        sums_biases: whether the gradient of a bias is a kernel of its own that sums over all rows (autograd), not the
            epilogue of another product (Transformer Engine).
        repeats_keys: whether keys and values are copied for every query head before attention.
        looks_first: whether one kernel finds the largest elements of fp8 blocks and another one casts them.
        expert_by_expert: whether fp8 products of experts are launched one expert after the other, even if one kernel
            computes those of all experts in 16 bits.
        counts_gradients: whether `host` is the time of every kernel that autograd launches, those for gradients and
            their sums included, and of the work for each parameter in an update. Else it is the time of one operator of
            the graph in each pass, as it was fitted.
        starts: operators that the host launches at the start of the forward and of the backward pass of a chunk while
            the device waits for it: a batch, its masks, and what comes from other stages.
        updates_apart: whether an update has passes of its own that set gradients to zero, scale those of fp16 back and
            look for infinities, and round weights from their masters (Megatron-LM's
            Float16OptimizerWithFloat16Params).
        waits_for_kernels: whether the host waits for every kernel before it launches the next one
            (CUDA_LAUNCH_BLOCKING=1), so that launches and kernels take turns.
        composes_scans: whether scans are PyTorch operators on GPUs too, as without the packages of their kernels; on
            other devices they always are.
        foreach: whether the optimizer is a chain of operators over all tensors (`foreach` of torch.optim), not one
            kernel.
        frees_gradients: whether gradients have no memory between an update and the backward pass that computes the next
            ones (torch.optim's zero_grad(set_to_none=True)).
        keeps_buckets: whether buckets for all gradients exist in addition to them (DistributedDataParallel without
            gradient_as_bucket_view). Counts only with `frees_gradients`.
        views_buckets: whether gradients are views of such buckets, which replace them. Counts only with
            `frees_gradients`.
        autocasts: whether weights are gathered in fp32 and rounded for use, and blocks pass on values in fp32
            (torch.autocast around FSDP without MixedPrecision: only products give 16 bits).
        roots_moments: whether the optimizer computes the roots of all second moments at once, in memory of their own
            (torch.optim's _multi_tensor_adam, its default on GPUs: `exp_avg_sq_sqrt`). Counts only with
            `frees_gradients`.
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
    grouped_slower: float = 1.0
    adds: bool = False
    casts: float = 1.0
    gathers_narrow: bool = False
    gathers_inputs_narrow: bool = False
    dispatcher: Dispatcher = "alltoall"
    buffers_of_experts: tuple[int, float] = (0, 1.0)
    fused_experts: bool = False
    sinks: float = 1.0
    has_sinks: bool = False
    window: int = 0
    biased: bool = False
    masked: bool = False
    drops_probabilities: bool = False
    ordered: bool = False
    hidden_dropout: HiddenDropout = "none"
    drops_tokens: bool = False
    masks_apart: bool = False
    softmax_heads: int = 1
    graphs: Graphs = "none"
    row_bytes: tuple[Bytes, Bytes] = (0.0, 0.0)
    scatter_gather: bool = False
    waits_to_send: bool = False
    composed_loss: ComposedLoss = ""
    composed_norms: bool = False
    composed_gelu: bool = False
    current_scaling: bool = False
    exchanges_at_once: bool = False
    exchanges_parts: bool = False
    owns_whole: bool = False
    reduces_whole: bool = False
    copies_gradients: int = 0
    routes_fused: bool = False
    sums_narrow: bool = False
    sums_biases: bool = False
    repeats_keys: bool = False
    looks_first: bool = False
    foreach: bool = False
    expert_by_expert: bool = False
    counts_gradients: bool = False
    starts: tuple[int, int] = (0, 0)
    updates_apart: bool = False
    waits_for_kernels: bool = False
    composes_scans: bool = False
    frees_gradients: bool = False
    keeps_buckets: bool = False
    views_buckets: bool = False
    roots_moments: bool = False
    autocasts: bool = False
    fuses_chains: bool = False
    views_heads: bool = False
    engine_launches: bool = False

    @property
    def drops_fused(self) -> bool:
        """Whether attention that drops probabilities is one kernel. In the runtime of this project it is not, so that
        which elements are dropped does not depend on the plan."""
        return self.attention != "unfused" and self.name != PYTORCH.name

    @property
    def has_buckets(self) -> bool:
        """Whether it sends several tensors together."""
        return bool(self.bucket or self.bucket_parameters)

    @property
    def one_bucket(self) -> bool:
        """Whether everything that is sent once a step is in one bucket.

        If reductions do not overlap the backward pass, Megatron-Core sets bucket_size = None
        (distributed_data_parallel.py), and older Megatron-LM always has a single bucket.
        """
        return bool(self.bucket_parameters) and not self.hidden.reductions

    def bucket_bytes(self, devices: int, element: Bytes) -> Bytes:
        """Bytes of a full bucket in a group of `devices` devices, with elements of `element` bytes."""
        return self.bucket or element * max(self.bucket_parameters, self.bucket_per_device * devices)

    @property
    def counts_rows(self) -> bool:
        """Whether the host must know the number of rows of each expert before it launches the experts.

        It must if products of experts are launched one by one, or in one call that takes their sizes, and no capacity
        fixes the sizes.
        """
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
"""The operators of the graph one by one, as `runtime` executes them: nothing is fused, overlapped or sent together. The
host takes 21 us for each kernel, where hand-written PyTorch takes 12.8 to 15.9 (docs/device.md)."""
