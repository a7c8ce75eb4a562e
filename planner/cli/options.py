"""The options that `plan` and `plan estimate` share, each defined once, in the order of `--help`.

A command that takes `options: Options` and is decorated with `taking_options` gets one command line option for each
field: `Options` is read like a signature. `planner.cli.taking` does the same for other dataclasses.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import typer

from planner.cli import completion
from planner.cli.option_kinds import (
    CONTEXT,
    FP8,
    GRADIENTS,
    HAND,
    JOB,
    LORA,
    OPERATORS,
    OUTPUT,
    OVERLAP,
    SEARCH,
    count,
    number,
    switch,
    word,
)
from planner.cli.spoken import hardware_of, model_of
from planner.cli.taking import taking

DEFAULT_HARDWARE = "h100-80gb"
LEFT_OUT = " Where not given, plan search decides it, and plan estimate takes 1."
"""What an open degree means; only `plan help` has room for it."""

Levels = Annotated[
    str | None,
    word(
        JOB,
        "LEVELS",
        "Network levels, innermost first, as in node=4,rack=8@50,cluster@25/2. They override those of the profile."
        " The example means: 4 devices per node; 8 nodes per rack at 50 GB/s per device and direction; 25 GB/s"
        " beyond, with 2 devices per uplink. A level keeps the profile's numbers that you leave out.",
    ),
]
SeqLen = Annotated[
    int | None,
    count(
        JOB,
        "--seq-len",
        "Sequence length in tokens, as in 8192 or 32k (default: the model's own). 32k is 32,768.",
        most=2**31,
    ),
]
GlobalBatch = Annotated[
    int | None,
    count(
        JOB,
        "--global-batch",
        "Global batch size in samples, as in 512 or 1k (default: 4 per device). 1k is 1,024. The default is 32 per"
        " device for images (Goyal et al. 2017), and 2,048 for clicks (Naumov et al. 2019).",
        most=2**31,
    ),
]
Precision = Annotated[
    str | None,
    word(
        JOB,
        "WORD",
        "Compute dtype: bf16, fp16, fp32, tf32 or fp8. tf32 is fp32 with matrix products in TF32. fp8 is bf16 with"
        " linear layers in fp8. Master weights are fp32. The default is fp16 on V100 and Ascend 910A, which"
        " have no matrix units for bf16.",
        "bf16; fp32 on CPUs",
        known=completion.precisions,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options given on the command line; None means not given."""

    model: Annotated[
        str | None,
        word(
            JOB,
            "NAME",
            "A model of the zoo (plan models), a config.json, or package.module:factory. Common names work, too:"
            " llama-8b, llama3-70b, meta-llama/Llama-3.1-70B. The last one is a local folder, if there is one of that"
            " name.",
            known=completion.models,
            meant=model_of,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        word(JOB, "KEY=VALUE", "Change a dimension of the model, as in num_layers=40. Repeatable."),
    ] = None
    devices: Annotated[
        int | None, count(JOB, "--devices", "Number of devices (default: those of the profile).", most=2**20)
    ] = None
    hardware: Annotated[
        str | None,
        word(
            JOB,
            "PROFILE",
            "Hardware profile (plan profiles), or a TOML file. Short names work: h100, a100. A heterogeneous pipeline"
            " lists its groups: h100-80gb:32,a100-80gb:32,between@12.5 means 32 H100 and 32 A100 with 12.5 GB/s per"
            " device between them (default: the bandwidth of the slower network).",
            DEFAULT_HARDWARE,
            known=completion.profiles,
            meant=hardware_of,
        ),
    ] = None
    cluster: Levels = None
    seq_len: SeqLen = None
    global_batch: GlobalBatch = None
    precision: Precision = None
    optimizer: Annotated[
        str | None,
        word(JOB, "WORD", "Optimizer: adamw, sgd (momentum), lamb or muon.", "adamw", known=completion.optimizers),
    ] = None
    engine: Annotated[
        str | None,
        word(
            JOB,
            "ENGINE",
            "Search the best plan that this engine can run. It is priced with the engine's own training stack. Engines:"
            " accelerate, deepspeed, megatron, megatron-bridge, mindformers, mindspeed, nemo, torch, torchtitan.",
            "",
            "--for",
            known=completion.engines,
        ),
    ] = None
    software: Annotated[
        str | None,
        word(
            JOB,
            "STACK",
            "Training stack that will run the plan (plan stacks). What a stack fuses, overlaps, keeps and launches"
            " changes time and memory. pytorch is the runtime of plan run.",
            "pytorch",
            known=completion.stacks,
        ),
    ] = None
    forward_only: Annotated[
        bool,
        switch(
            JOB,
            "--forward-only",
            "Plan the forward pass alone, for evaluation. The plan has no backward pass, gradients or optimizer states,"
            " and frees activations as they are used. plan run evaluates such a plan.",
        ),
    ] = False

    tensor: Annotated[int | None, number(HAND, "Tensor-parallel degree." + LEFT_OUT)] = None
    pipeline: Annotated[int | None, number(HAND, "Pipeline-parallel degree." + LEFT_OUT)] = None
    data: Annotated[
        int | None,
        number(HAND, "Data-parallel degree. Where not given, it is what the other degrees leave."),
    ] = None
    context: Annotated[int | None, number(HAND, "Context-parallel degree (splits the sequence)." + LEFT_OUT)] = None
    expert: Annotated[int | None, number(HAND, "Expert-parallel degree (divides data x context)." + LEFT_OUT)] = None
    zero: Annotated[
        int | None,
        number(
            HAND,
            "ZeRO stage: 0 none, 1 optimizer states, 2 also gradients, 3 also weights. Where not given, plan search"
            " decides it, and plan estimate takes 0.",
            least=0,
            most=3,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        number(HAND, "HSDP: replicas of the sharded state. Each of N groups of devices shards what --zero says.", "1"),
    ] = None
    micro_batch: Annotated[
        int | None,
        number(HAND, "Micro-batch size, in samples per data-parallel rank. Where not given, it is searched."),
    ] = None
    micro_batches: Annotated[
        int | None, number(HAND, "Number of micro-batches per step. Give this or --micro-batch.")
    ] = None
    recompute: Annotated[
        str | None,
        word(
            HAND,
            "WORD",
            "Activation recomputation: none, selective or full. Where not given, the search decides it per block.",
            known=completion.recomputation,
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        switch(
            HAND,
            "--sequence-parallel/--no-sequence-parallel",
            "Megatron's sequence parallelism. Norms split the sequence over tensor-parallel devices. Where not given,"
            " it is searched.",
        ),
    ] = None
    offload: Annotated[
        str | None,
        word(
            HAND,
            "WHAT[:WHERE]",
            "Offload optimizer, activations, saved or weights. The target is the host. optimizer: optimizer states;"
            " activations: inputs of recomputed blocks; saved: tensors that other blocks save for backward;"
            " weights: weights of repeated blocks. :disk puts them on a disk. Join several by commas. auto"
            " takes what makes the step fastest; none excludes offload.",
            "if needed",
            known=completion.offload,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        word(
            HAND,
            "NAME",
            "Pipeline schedule: 1f1b, gpipe, interleaved_1f1b, zb_h1, seqpipe. More: eager_1f1b (1F1B with twice the"
            " warm-up), zb_v and dualpipe_v (two stages per rank, in a V), pipedream and pipedream_2bw (asynchronous)."
            " Where not given, the search takes the fastest synchronous one; those in a V only where pipelines idle.",
            known=completion.schedules,
        ),
    ] = None
    virtual_stages: Annotated[
        str | None,
        word(HAND, "N|auto", "Virtual stages per pipeline rank. More than one is interleaved 1F1B.", "auto"),
    ] = None
    mesh: Annotated[
        str | None,
        word(HAND, "AxB", "Device mesh of a stage, slowest links first, as in 8x4. Replaces degrees."),
    ] = None
    mode: Annotated[
        str | None,
        word(
            HAND,
            "MODE",
            "Preset, such as data_parallel. The names are MindSpore's. Others: stand_alone, parameter_server,"
            " semi_auto_parallel, hybrid_parallel, manual (docs/deciding.md).",
            "auto_parallel",
            known=completion.modes,
        ),
    ] = None

    output: Annotated[
        str | None,
        word(
            OUTPUT,
            "FILE",
            "Plan file to write. Where not given, plan search writes MODEL-DEVICES.json, and plan estimate nothing.",
            "",
            "-o",
            "--output",
        ),
    ] = None
    explain: Annotated[
        bool, switch(OUTPUT, "--explain", "Say what limits the plan, and what the next best would cost.")
    ] = False
    layouts: Annotated[
        bool, switch(OUTPUT, "--layouts", "Show sharding as factors and layouts in place of the names of patterns.")
    ] = False
    write_all: Annotated[
        bool,
        switch(
            OUTPUT,
            "--write-all",
            "Write the other plans of --top and --pareto too. They are called NAME-2.json and so on.",
        ),
    ] = False
    as_json: Annotated[bool, switch(OUTPUT, "--json", "Print the result as JSON on stdout and nothing else.")] = False
    quiet: Annotated[bool, switch(OUTPUT, "--quiet -q", "Print neither progress nor report.")] = False
    verbose: Annotated[
        bool, switch(OUTPUT, "--verbose -v", "Say on stderr what was evaluated, what was cut off, and why.")
    ] = False

    memory_limit: Annotated[
        str | None,
        word(SEARCH, "SIZE", "Memory per device that the plan may use, as in 64GiB.", "all of it"),
    ] = None
    memory_margin: Annotated[
        str | None,
        word(
            SEARCH,
            "SHARE",
            "Share of the peak to leave free for its error, as in 5%. 0% fills the device. Where not given,"
            " it follows from the errors of measured runs with the training stack.",
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop after this time, with the best plan so far and its gap. The time is that of the whole command,"
            " tracing included.",
            min=0.0,
            show_default="none",
            rich_help_panel=SEARCH,
        ),
    ] = None
    objective: Annotated[
        str | None,
        word(
            SEARCH,
            "WORD",
            "Minimize time, memory or cost. time: of a step; memory: per device; cost: device-seconds of a step,"
            " with fewer devices where that is cheaper.",
            "time",
            known=completion.objectives,
        ),
    ] = None
    top: Annotated[int | None, number(SEARCH, "Show the N best plans.", "1", most=1000)] = None
    pareto: Annotated[
        bool,
        switch(SEARCH, "--pareto", "Show the Pareto front of time and memory, or --objective cost."),
    ] = False
    simplicity: Annotated[
        str | None,
        word(
            SEARCH,
            "PERCENT",
            "Prefer simpler plans up to this much slower. 0 takes the fastest plan. A plan is simpler if less has to be"
            " said to write it down. The proof is about the fastest plan in any case.",
            "1%",
        ),
    ] = None
    search: Annotated[
        str | None,
        word(
            SEARCH,
            "ALGORITHM",
            "Search algorithm; plan help search lists all. The others are recursive_programming, ilp, exhaustive, and"
            " sharding_propagation, which spreads what --shard says (docs/questions.md).",
            "dynamic_programming",
            known=completion.algorithms,
        ),
    ] = None
    certify: Annotated[
        bool, switch(SEARCH, "--certify", "Check the slowest pipeline rank with an integer program.")
    ] = False
    planner_memory: Annotated[
        str | None,
        word(
            SEARCH,
            "SIZE",
            "Memory that the planner itself may use, as in 8GiB. At this limit the search ends with the best plan so"
            " far. Where not given, it is most of what is available.",
        ),
    ] = None
    graph_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of traced graphs of zoo models and config.json; none turns it off. The key is made of sources and"
            " versions. PLAN_GRAPH_CACHE=none turns it off, too (default: ~/.cache/parallel-planner/graphs).",
        ),
    ] = None
    rule_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of sharding rules found by trial. Operators that docs/operators.md does not list get"
            " rules by trial, a second each; cached rules are verified.",
            "none",
        ),
    ] = None
    full_trace: Annotated[bool, switch(SEARCH, "--full-trace", "Trace every repeated block. Slower, same graph.")] = (
        False
    )

    tensor_overlap: Annotated[
        str | None,
        word(
            OVERLAP,
            "N|auto|off",
            "Chunks of overlapped tensor-parallel collectives. Each collective is cut into N chunks, and a chunk"
            " travels while the matrix product of another one runs. off exposes the collectives. auto takes as many"
            " chunks as save time, and none on CPUs.",
            "auto",
        ),
    ] = None
    expert_overlap: Annotated[
        str | None,
        word(
            OVERLAP,
            "auto|on|off",
            "Overlap the all-to-all of experts. It overlaps with shared experts, and with weight gradients of experts."
            " auto does so where that saves time, but not on CPUs.",
            "auto",
        ),
    ] = None
    interleave: Annotated[
        str | None,
        word(
            OVERLAP,
            "N|auto",
            "Interleaved micro-batches: one computes while another communicates. N of them take turns; auto takes the"
            " fastest number. Where not given, it is 1, and more are tried on the best plan.",
        ),
    ] = None
    slices: Annotated[
        str | None,
        word(
            OVERLAP,
            "N|auto",
            "Sequence slices per micro-batch (seqpipe). auto takes the fastest number. Where not given, it is 1, and"
            " more are tried on the best plan.",
        ),
    ] = None
    no_overlap: Annotated[
        bool,
        switch(
            OVERLAP,
            "--no-overlap",
            "Expose every collective, for debugging. It is --tensor-overlap off, --expert-overlap off,"
            " --interleave 1, --buckets none and --gathers each.",
        ),
    ] = False

    context_by: Annotated[
        str | None,
        word(
            CONTEXT,
            "WORD",
            "Context parallelism by: heads, ring, hybrid or auto. heads (Ulysses): all-to-all; ring: ring"
            " attention; hybrid: Ulysses within a ring; auto compares them, and all degrees where"
            " --context is not given. The default is heads; where no degree is given, rings are tried around"
            " the best plan, too.",
            "heads",
            known=completion.contexts,
        ),
    ] = None
    ulysses: Annotated[
        int | None,
        number(CONTEXT, "Ulysses degree within --context, for --context-by hybrid or auto. Searched by default."),
    ] = None
    zigzag: Annotated[
        bool | None,
        switch(
            CONTEXT,
            "--zigzag/--no-zigzag",
            "Zigzag order in causal ring attention, which balances its work (default: yes).",
        ),
    ] = None
    alltoall: Annotated[
        bool | None,
        switch(
            CONTEXT,
            "--alltoall/--no-alltoall",
            "Allow the all-to-all (default: yes). --no-alltoall uses all-gather and slice, for links or backends that"
            " lack the all-to-all.",
        ),
    ] = None
    alltoall_on: Annotated[
        str | None,
        word(
            CONTEXT,
            "LINKS",
            "Links with an all-to-all: all, node, none or auto. node: links inside a node; none: as --no-alltoall; auto"
            " searches with each of them and takes the best plan.",
            "all",
            known=completion.alltoall,
        ),
    ] = None
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="TIMES",
            help="Maximum expert load over the mean load, under expert parallelism. It scales computation,"
            " communication and activations of the busiest device; 1 is a balanced router.",
            show_default="1",
            rich_help_panel=CONTEXT,
        ),
    ] = None
    tokens_once: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Send each token once to a node of N devices. The node copies it for the experts inside. Without this"
            " option a token is sent once for each of its experts. Experts are sharded over two axes: nodes, and the N"
            " devices of a node. Above 1, --expert is a multiple of N. 1 sends a token once to each device.",
            rich_help_panel=CONTEXT,
        ),
    ] = None

    gradients: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "Gradients of the mean loss, or of its sum. The mean is over the global batch; sum is mean times"
            " micro-batches and data-parallel degree.",
            "mean",
            known=completion.gradients,
        ),
    ] = None
    gradient_dtype: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "Dtype of gradients: fp32, parameter or mixed. Gradients are accumulated and reduced in it. parameter is"
            " the dtype of the weights. mixed is fp32, but ZeRO 2 and 3 reduce each micro-batch in the dtype of the"
            " weights.",
            "mixed",
            known=completion.gradient_dtypes,
        ),
    ] = None
    master_weights: Annotated[
        bool | None,
        switch(
            GRADIENTS,
            "--master-weights/--no-master-weights",
            "Keep fp32 master weights of 16-bit weights (default: yes).",
        ),
    ] = None
    moment_dtype: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "Dtype of optimizer moments: fp32 or bf16. Updates are computed in fp32. bf16 rounds the stored moments"
            " (Adam's exp_avg and exp_avg_sq, or momentum). Take a beta2 of about 0.95 with it; 0.999 needs fp32.",
            "fp32",
            known=completion.moment_dtypes,
        ),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Clip gradients to this global norm.",
            show_default="no clipping",
            rich_help_panel=GRADIENTS,
        ),
    ] = None
    buckets: Annotated[
        str | None,
        word(
            GRADIENTS,
            "SIZES",
            "Gradient buckets: auto, none, 25MiB, or a list. New weights are gathered in the same buckets."
            " auto: a size that suits the links. A list is 20,35 (parameters 0 to 19, 20 to 34, the"
            " rest), or '*attn*=0,*mlp*=1' (equal numbers together).",
            "auto",
        ),
    ] = None
    gathers: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "ZeRO-3 all-gather: each, block, ahead or auto. each gathers a weight at its use; block coalesces the"
            " all-gathers of a block; ahead prefetches them during the block before; auto takes whichever makes"
            " the fastest plan.",
            "auto",
        ),
    ] = None
    zero_by: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "ZeRO-1 by: slices, parameters, servers or auto. slices cuts every parameter. parameters: each"
            " data-parallel rank owns whole parameters, updates them and broadcasts the new weights, so no dim has to"
            " divide; --zero 1 gives all states an owner; without it the search slices those for which that is faster."
            " servers: gradients are pushed to parameter servers on the hosts, which keep all states and update the"
            " weights. auto: slices or parameters, whichever has the better objective.",
            "slices",
            known=completion.zero_by,
        ),
    ] = None
    broadcast: Annotated[bool, switch(GRADIENTS, "--broadcast", "Broadcast the weights of rank 0 at the start.")] = (
        False
    )
    local_parameters: Annotated[
        list[str] | None,
        word(
            GRADIENTS,
            "PATTERN",
            "Parameters without gradient reduction: each device keeps its own. Repeatable.",
        ),
    ] = None

    shard: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=STRATEGY",
            "Strategy of the operators that match. '*q_proj*=b,o' names a factor for each mesh axis (- for"
            " none, * for any). '*q_proj*=((4,1,1),(2,1))' says how many pieces each dim of each operand"
            " is cut into. Repeatable.",
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        word(OPERATORS, "PLAN[:PATTERN]", "Take strategies from a plan file, for the operators that match."),
    ] = None
    default: Annotated[
        str | None,
        word(
            OPERATORS,
            "WORD",
            "All other operators: search or data_parallel. search searches them, too; data_parallel splits the batch"
            " and keeps their weights whole, as MindSpore's semi_auto_parallel does.",
            "search",
            known=completion.defaults,
        ),
    ] = None
    place: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=WHERE",
            "Embedding tables on hosts or servers: PATTERN=host or =servers. host shards them over the hosts of the"
            " ranks; servers are parameter servers (docs/parameter-servers.md). Repeatable. auto: on hosts where that"
            " is faster; none: on devices. Where not given, tables are on hosts only if nothing fits otherwise.",
        ),
    ] = None
    pad: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=N",
            "Pad weights with zero rows to a multiple of N. For dims that the number of shards does not divide, such as"
            " a vocabulary of 50257 over 4. Tensors that share the dim grow with it, and the model computes the same."
            " Repeatable. batch=N pads the global batch with samples of weight zero. auto pads, where that is faster,"
            " the batch, and the dims and heads that --tensor does not divide (without --tensor: that up to 8 devices"
            " do not divide); also rows that are no multiple of 16 bytes, where products of such rows take longer.",
        ),
    ] = None
    per_replica: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN",
            "Operators that each replica computes over its own samples. A replica is data-parallel. Example: batch"
            " norm in DistributedDataParallel without SyncBatchNorm (MindSpore: cross_batch). Without this option"
            " every plan computes over the whole batch. PATTERN names operators or modules ('*norm*'; '*' for all"
            " that look at several samples). PATTERN=N sets the number of replicas; without it, that is --data, or"
            " the devices that --pipeline, --tensor and --context leave. Running statistics are those of the first"
            " replica. Repeatable.",
            "",
            "--per-replica",
            "--cross-batch",
        ),
    ] = None

    fp8: Annotated[
        str | None,
        word(
            FP8,
            "RECIPE",
            "Recipe: tensorwise, rowwise, blockwise, delayed, mxfp8. Also rowwise_with_gw_hp, which is rowwise with"
            " weight gradients as without fp8. blockwise has a scale for each 128 elements (DeepSeek-V3), mxfp8 for"
            " each 32 (Blackwell); delayed has scales of earlier steps (Transformer Engine). --precision fp8 means"
            " tensorwise. The search keeps layers out of fp8 that are faster without it.",
            "",
            known=completion.recipes,
        ),
    ] = None
    fp8_layers: Annotated[
        list[str] | None,
        word(
            FP8,
            "PATTERN",
            "Linear layers that are in fp8 in any case, as in '*.mlp.*'. Repeatable; '*' means all. With --fp8-experts"
            " it means experts, too. The search decides about the others.",
        ),
    ] = None
    fp8_left_out: Annotated[
        list[str] | None,
        word(FP8, "PATTERN", "Linear layers and experts that stay out of fp8, as in '*.o_proj.weight'. Repeatable."),
    ] = None
    fp8_gathered: Annotated[
        bool,
        switch(
            FP8,
            "--fp8-gathered",
            "Gather weights of blocks in fp8. Recipes: tensorwise, delayed, blockwise. The search does so where it is"
            " faster.",
        ),
    ] = False
    fp8_experts: Annotated[
        bool,
        switch(
            FP8,
            "--fp8-experts",
            "Experts compute by the recipe of --fp8, too. The search keeps those out that are faster without.",
        ),
    ] = False
    fp8_dispatch: Annotated[
        bool,
        switch(
            FP8,
            "--fp8-dispatch",
            "Send tokens to experts in 8 bits, gradients too. There is a scale for each 128 elements of a token"
            " (DeepSeek-V3). What comes back from experts is not cast.",
        ),
    ] = False
    fp8_history: Annotated[
        int | None,
        number(FP8, "With --fp8 delayed: steps in the history of a scale.", "1024"),
    ] = None
    fp8_margin: Annotated[
        int | None,
        number(FP8, "With --fp8 delayed: powers of two that scales leave free.", "0", least=-64, most=64),
    ] = None

    lora: Annotated[
        int | None,
        number(
            LORA,
            "Rank of low-rank adapters (LoRA). All weights of the model are frozen. Two narrow weights beside each"
            " linear layer of its blocks are trained.",
            most=4096,
        ),
    ] = None
    lora_alpha: Annotated[
        str | None, word(LORA, "ALPHA", "The output of adapters is scaled by ALPHA / rank.", "2 x rank")
    ] = None
    lora_dropout: Annotated[str | None, word(LORA, "SHARE", "Dropout on the input of adapters.", "0")] = None
    lora_layers: Annotated[
        str | None,
        word(
            LORA,
            "NAMES",
            "Linear layers with adapters, as in q_proj,v_proj. Give the ends of their names, as in peft's"
            " target_modules. Where not given, all linear layers of the blocks have adapters.",
        ),
    ] = None
    lora_trained: Annotated[
        str | None,
        word(
            LORA,
            "NAMES",
            "Modules trained in full beside adapters (peft's modules_to_save). Give the ends of their names, as in"
            " score.",
        ),
    ] = None

    @property
    def reference(self) -> str:
        """The model to plan, with the changes of --set."""
        from planner.models.adapters import KEYS
        from planner.models.overrides import changed_reference

        assert self.model is not None
        adapters = [f"{key}={value}" for key in KEYS if (value := getattr(self, key)) is not None]
        return changed_reference(self.model, (*(self.set or ()), *adapters))

    @property
    def device_count(self) -> int:
        """Devices to plan for."""
        from planner.cli.machines import devices_of

        return self.devices or devices_of(self.profile)

    @property
    def profile(self) -> str:
        """The hardware to plan for."""
        return DEFAULT_HARDWARE if self.hardware is None else self.hardware

    @property
    def speaks(self) -> bool:
        """Whether a person reads the output."""
        return not (self.as_json or self.quiet)

    def given(self) -> tuple[str, ...]:
        """Names of the fields that were given on the command line."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) not in (f.default, [], ()))


def flag(field: str) -> str:
    """The option name of a field."""
    return "--json" if field == "as_json" else "--for" if field == "engine" else "--" + field.replace("_", "-")


taking_options = taking("options", Options, get_type_hints(Options, include_extras=True))
