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
    BLOCKS,
    GRADIENTS,
    HAND,
    JOB,
    OPERATORS,
    OUTPUT,
    SEARCH,
    count,
    number,
    switch,
    word,
)
from planner.cli.spoken import hardware_of, model_of
from planner.cli.taking import taking

DEFAULT_HARDWARE = "h100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options given on the command line; None means not given."""

    model: Annotated[
        str | None,
        word(
            JOB,
            "NAME",
            "Of the zoo (plan models), a config.json, or package.module:factory. Names are read as people"
            " write them: llama-8b, llama3-70b, meta-llama/Llama-3.1-70B (a local folder of that name,"
            " else the zoo).",
            known=completion.models,
            meant=model_of,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        word(
            JOB,
            "KEY=VALUE",
            "Change a dimension of the model, as in num_layers=40. Repeatable.",
        ),
    ] = None
    devices: Annotated[
        int | None, count(JOB, "--devices", "Number of devices (default: those of the profile).", most=2**20)
    ] = None
    hardware: Annotated[
        str | None,
        word(
            JOB,
            "PROFILE",
            "A profile (plan profiles) or a TOML file. h100, a100 and the like are taken. A heterogeneous pipeline"
            " lists its groups, h100-80gb:32,a100-80gb:32,between@12.5: 32 H100 and 32 A100 with 12.5 GB/s per"
            " device between them (where left out: that of the slower network).",
            DEFAULT_HARDWARE,
            known=completion.profiles,
            meant=hardware_of,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        word(
            JOB,
            "LEVELS",
            "Network levels, innermost first: node=4,rack=8@50,cluster@25/2. These override those of the"
            " profile: 4 devices per node, 8 nodes per rack at 50 GB/s per device and direction, and 25"
            " GB/s beyond, with 2 devices per uplink. Levels keep what is left out.",
        ),
    ] = None
    software: Annotated[
        str | None,
        word(
            JOB,
            "STACK",
            "The training stack that will run the plan (plan stacks). What it fuses, overlaps, keeps and"
            " launches changes time and memory. pytorch is our runtime.",
            "pytorch",
            known=completion.stacks,
        ),
    ] = None
    engine: Annotated[
        str | None,
        word(
            JOB,
            "ENGINE",
            "The engine that will train. The best plan that it can be told is searched, priced by its own stack: of"
            " accelerate, deepspeed, megatron, megatron-bridge, mindformers, mindspeed, nemo, torch, torchtitan.",
            "",
            "--for",
            known=completion.engines,
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        count(
            JOB,
            "--seq-len",
            "Sequence length in tokens, as in 8192 or 32k (default: the model's own). 32k is 32,768.",
            most=2**31,
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        count(
            JOB,
            "--global-batch",
            "Global batch size in samples, as in 512 or 1k (default: 4 per device). 1k is 1,024. The default is 32 per"
            " device of images (Goyal et al. 2017), and 2,048 of clicks (Naumov et al. 2019).",
            most=2**31,
        ),
    ] = None
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="TIMES",
            help="Maximum expert load over the mean, under expert parallelism. It is tokens of the busiest"
            " device over the mean, and scales its compute, communication and activations; 1 is a"
            " balanced router.",
            rich_help_panel=JOB,
        ),
    ] = None
    tokens_once: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Send a token once to each node of N devices. Under expert parallelism it is copied there for its"
            " experts, instead of sent once for each of them; experts are cut over two axes, nodes and N. 1 sends"
            " it once to each device; of more, --expert is a multiple.",
            rich_help_panel=JOB,
        ),
    ] = None
    precision: Annotated[
        str | None,
        word(
            JOB,
            "WORD",
            "Compute dtype: bf16, fp16, fp32, tf32 or fp8. tf32 is fp32 with matrix products in TF32, fp8 linear"
            " layers in fp8 and all else in bf16 (on CPUs fp32). Master weights are fp32.",
            known=completion.precisions,
        ),
    ] = None
    fp8: Annotated[
        str | None,
        word(
            JOB,
            "RECIPE",
            "Recipe of linear layers in fp8. Recipes of torchao: tensorwise, which --precision fp8 means, rowwise, or"
            " rowwise_with_gw_hp, whose weight gradients are as without fp8; blockwise, a scale for each 128 elements,"
            " as DeepSeek-V3; delayed, with scales of steps before, as Transformer Engine; or mxfp8, one for each 32,"
            " on Blackwell. The search leaves out layers that are faster so.",
            "",
            known=completion.recipes,
        ),
    ] = None
    fp8_layers: Annotated[
        list[str] | None,
        word(
            JOB,
            "PATTERN",
            "Linear layers that are in fp8 in any case, as in '*.mlp.*'. Repeatable; '*' means all. With --fp8-experts"
            " it means experts, too. Of the others the search decides.",
        ),
    ] = None
    fp8_left_out: Annotated[
        list[str] | None,
        word(JOB, "PATTERN", "Linear layers that stay out of fp8, as in '*.o_proj.weight'. Repeatable. Experts, too."),
    ] = None
    fp8_gathered: Annotated[
        bool,
        typer.Option(
            "--fp8-gathered",
            help="Gather weights of blocks in fp8: tensorwise, delayed or blockwise. The search does where that pays.",
            rich_help_panel=JOB,
        ),
    ] = False
    fp8_experts: Annotated[
        bool,
        typer.Option(
            "--fp8-experts",
            help="Experts may compute by the recipe of --fp8, too. The search leaves out those that are faster so.",
            rich_help_panel=JOB,
        ),
    ] = False
    fp8_dispatch: Annotated[
        bool,
        typer.Option(
            "--fp8-dispatch",
            help="Send tokens to experts in 8 bits, gradients too. A scale stands for 128 elements of a token"
            " (DeepSeek-V3); what comes back from experts is not cast.",
            rich_help_panel=JOB,
        ),
    ] = False
    fp8_history: Annotated[
        int | None,
        number(JOB, "With --fp8 delayed, steps in the history of a scale (1024)."),
    ] = None
    fp8_margin: Annotated[
        int | None,
        number(JOB, "With --fp8 delayed, powers of two that scales leave free (0).", least=-64, most=64),
    ] = None
    optimizer: Annotated[
        str | None,
        word(JOB, "WORD", "Optimizer: adamw, sgd (momentum), lamb or muon.", "adamw", known=completion.optimizers),
    ] = None
    lora: Annotated[
        int | None,
        number(
            JOB,
            "Rank of low-rank adapters (LoRA). The weights of the model are frozen, and two narrow ones beside each"
            " linear layer of its blocks are trained.",
            most=4096,
        ),
    ] = None
    lora_alpha: Annotated[str | None, word(JOB, "ALPHA", "Adapters count ALPHA / rank times (ALPHA: 2 x rank).")] = None
    lora_dropout: Annotated[str | None, word(JOB, "SHARE", "Dropout on the input of adapters (0).")] = None
    lora_layers: Annotated[
        str | None,
        word(
            JOB,
            "NAMES",
            "Linear layers with adapters (all of the blocks). Give the ends of their names, as in q_proj,v_proj: the"
            " target_modules of peft.",
        ),
    ] = None
    lora_trained: Annotated[
        str | None,
        word(
            JOB,
            "NAMES",
            "Modules trained in full beside adapters. Give the ends of their names, as in score: the"
            " modules_to_save of peft.",
        ),
    ] = None
    forward_only: Annotated[
        bool,
        switch(
            JOB,
            "--forward-only",
            "Plan the forward pass alone: evaluation, never training. No backward pass, gradients or states of an"
            " optimizer are priced or kept; activations are freed as they are used. plan run evaluates such a plan.",
        ),
    ] = False
    full_trace: Annotated[bool, switch(JOB, "--full-trace", "Trace every repeated block. Slower, same graph.")] = False

    mode: Annotated[
        str | None,
        word(
            HAND,
            "MODE",
            "Preset: data_parallel, parameter_server or hybrid_parallel. Or stand_alone, semi_auto_parallel, or"
            " auto_parallel, the default.",
            known=completion.modes,
        ),
    ] = None
    tensor: Annotated[int | None, number(HAND, "Tensor-parallel degree.")] = None
    pipeline: Annotated[int | None, number(HAND, "Pipeline-parallel degree.")] = None
    data: Annotated[int | None, number(HAND, "Data-parallel degree.")] = None
    context: Annotated[int | None, number(HAND, "Context-parallel degree (splits the sequence).")] = None
    context_by: Annotated[
        str | None,
        word(
            HAND,
            "WORD",
            "Context parallelism by: heads, ring, hybrid or auto. heads (Ulysses): all-to-all; ring: ring"
            " attention; hybrid: Ulysses within a ring; auto compares them, and all degrees where"
            " --context is not given. By default heads; where no degree is given, rings are tried around"
            " the best plan, too.",
            known=completion.contexts,
        ),
    ] = None
    ulysses: Annotated[
        int | None, number(HAND, "Ulysses degree within --context, for --context-by hybrid or auto.")
    ] = None
    zigzag: Annotated[
        bool | None,
        switch(
            HAND,
            "--zigzag/--no-zigzag",
            "Zigzag order in causal ring attention, which balances its work.",
        ),
    ] = None
    alltoall: Annotated[
        bool | None,
        switch(
            HAND,
            "--alltoall/--no-alltoall",
            "Allow the all-to-all (else all-gather and slice). For links or backends that lack it.",
        ),
    ] = None
    alltoall_on: Annotated[
        str | None,
        word(
            HAND,
            "LINKS",
            "Where the all-to-all is: all, node, none or auto. node: links inside a node; none: as --no-alltoall; auto"
            " searches with each of them and takes the best plan.",
            "all",
            known=completion.alltoall,
        ),
    ] = None
    expert: Annotated[int | None, number(HAND, "Expert-parallel degree (divides data x context).")] = None
    zero: Annotated[
        int | None,
        number(
            HAND,
            "ZeRO stage: 0 none, 1 states, 2 also gradients, 3 also weights.",
            least=0,
            most=3,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        number(HAND, "HSDP: number of groups that each shard what --zero says."),
    ] = None
    micro_batch: Annotated[int | None, number(HAND, "Micro-batch size, in samples per data-parallel rank.")] = None
    micro_batches: Annotated[int | None, number(HAND, "Number of micro-batches per step.")] = None
    virtual_stages: Annotated[
        str | None,
        word(HAND, "N|auto", "Virtual stages per pipeline rank. More than one is interleaved 1F1B.", "auto"),
    ] = None
    schedule: Annotated[
        str | None,
        word(
            HAND,
            "NAME",
            "Pipeline schedule: 1f1b, gpipe, interleaved_1f1b, zb_h1, seqpipe. Twice the warm-up: eager_1f1b. In a"
            " V: zb_v, dualpipe_v. Asynchronous: pipedream, pipedream_2bw. Where not given, the fastest with a"
            " flush; those in a V where pipelines are idle.",
            known=completion.schedules,
        ),
    ] = None
    interleave: Annotated[
        str | None,
        word(
            HAND,
            "N|auto",
            "One micro-batch computes while another communicates. N of them take turns; auto takes the fastest number."
            " By default 1, and more are tried on the best plan.",
        ),
    ] = None
    tensor_overlap: Annotated[
        str | None,
        word(
            HAND,
            "N|auto",
            "Chunks of overlapped tensor-parallel collectives. Each collective is cut into N, and a"
            " chunk travels while the product of another computes; off waits for them. By default auto: as"
            " many as save time, but none on CPUs.",
        ),
    ] = None
    expert_overlap: Annotated[
        str | None,
        word(
            HAND,
            "auto|on|off",
            "Overlap the all-to-all of experts. Rows travel while shared experts, and gradients of the experts'"
            " weights, are computed. By default auto: where that saves time, but not on CPUs.",
        ),
    ] = None
    no_overlap: Annotated[
        bool,
        switch(
            HAND,
            "--no-overlap",
            "Overlap no collective, for debugging. It is --tensor-overlap off, --expert-overlap off,"
            " --interleave 1, --buckets none and --gathers each.",
        ),
    ] = False
    slices: Annotated[
        str | None,
        word(
            HAND,
            "N|auto",
            "Sequence slices per micro-batch (seqpipe). auto takes the fastest number. By default 1, and more are tried"
            " on the best plan.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        word(HAND, "AxB", "Device mesh of a stage, slowest links first, as in 8x4. Replaces degrees."),
    ] = None

    sequence_parallel: Annotated[
        bool | None,
        switch(
            BLOCKS,
            "--sequence-parallel/--no-sequence-parallel",
            "Norms split the sequence over tensor-parallel devices. This is Megatron's sequence parallelism.",
        ),
    ] = None
    recompute: Annotated[
        str | None, word(BLOCKS, "WORD", "Recomputation: none, selective or full.", known=completion.recomputation)
    ] = None
    offload: Annotated[
        str | None,
        word(
            BLOCKS,
            "WHAT[:WHERE]",
            "Offload optimizer, activations, saved or weights. optimizer: states;"
            " activations: inputs of recomputed blocks; saved: tensors saved for backward by other"
            " blocks; weights: of repeated blocks. :disk puts it on a disk. Join several by commas; auto"
            " takes what makes the step fastest; none excludes it.",
            "if needed",
            known=completion.offload,
        ),
    ] = None
    shard: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=STRATEGY",
            "Sharding of the operators that match. '*q_proj*=b,o' names a factor per mesh axis (- for"
            " none, * for any). '*q_proj*=((4,1,1),(2,1))' says how many pieces each dim of each operand"
            " is cut into. Repeatable.",
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PLAN[:PATTERN]",
            "Take shardings from a plan file, for the operators that match.",
        ),
    ] = None
    default: Annotated[
        str | None,
        word(
            OPERATORS,
            "WORD",
            "All other operators: search or data_parallel. search decides them too; data_parallel splits the batch and"
            " keeps their weights whole, as MindSpore's semi_auto_parallel does.",
            "search",
            known=completion.defaults,
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
            "Dtype of gradients: fp32, parameter or mixed. They are added up and reduced in it. parameter is that"
            " of the weights; mixed is fp32, but ZeRO 2 and 3 reduce each micro-batch in that of the"
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
            "fp32 master weights of 16-bit weights.",
        ),
    ] = None
    moment_dtype: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "Dtype of optimizer moments: fp32 or bf16. Updates are computed in fp32; bf16 rounds what is kept of them,"
            " Adam's exp_avg and exp_avg_sq or momentum, and wants a beta2 of about 0.95 (0.999 needs fp32).",
            "fp32",
            known=completion.moment_dtypes,
        ),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(metavar="NORM", help="Clip gradients to this global norm.", rich_help_panel=GRADIENTS),
    ] = None
    buckets: Annotated[
        str | None,
        word(
            GRADIENTS,
            "SIZES",
            "Gradient buckets: auto, none, 25MiB, or a list. They are also those of gathered new weights."
            " auto: a size that suits the links; a list is 20,35 (parameters 0 to 19, 20 to 34, the"
            " rest), or '*attn*=0,*mlp*=1' (equal numbers together).",
            "auto",
        ),
    ] = None
    gathers: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "ZeRO-3 all-gather: each, block, ahead or auto. each: at its use; block coalesces"
            " those of a block; ahead prefetches them during the block before; auto takes whichever makes"
            " the fastest plan.",
            "auto",
        ),
    ] = None
    broadcast: Annotated[bool, switch(GRADIENTS, "--broadcast", "Broadcast the weights of rank 0 at the start.")] = (
        False
    )
    zero_by: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "ZeRO-1 by slices, parameters or servers. parameters: each data-parallel rank owns"
            " whole parameters, updates them and broadcasts the new weights, so that no dim has to divide; --zero 1"
            " keeps all states so, without it the search slices those for which that is faster. servers: gradients are"
            " pushed to parameter servers on the hosts of the ranks, which keep all states and update weights. auto:"
            " slices or parameters, the better by the objective.",
            "slices",
            known=completion.zero_by,
        ),
    ] = None
    local_parameters: Annotated[
        list[str] | None,
        word(
            GRADIENTS,
            "PATTERN",
            "Parameters without gradient reduction. Each device keeps them for itself. Repeatable.",
        ),
    ] = None

    place: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=WHERE",
            "Embedding tables: on the host, or on servers. On the host they are sharded over the ranks;"
            " parameter servers are in docs/parameter-servers.md. Repeatable. auto: on the host where"
            " that is faster; none: on the devices (where not given: on the host if nothing fits"
            " otherwise).",
        ),
    ] = None

    pad: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=N",
            "Pad weights with zero rows to a multiple of N. For dims that devices do not divide, as a vocabulary of"
            " 50257 over 4: what else has the dim grows with it, and the model computes the same. Repeatable."
            " batch=N: the global batch, with samples of weight zero at its end. auto: what --tensor does not divide,"
            " heads too, and the batch, where that is faster (without it, what up to 8 devices do not); rows of 16"
            " bytes, where products of others take longer.",
        ),
    ] = None

    per_replica: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN",
            "Operators that each replica computes alone. Each data-parallel replica computes them over its own"
            " samples, as batch norm in DistributedDataParallel without SyncBatchNorm (MindSpore: cross_batch); without"
            " this option every plan computes over the whole batch. PATTERN means operators or modules ('*norm*', '*'"
            " for all that look at several samples); PATTERN=N: of N replicas, instead of --data or of all devices that"
            " --pipeline, --tensor and --context leave. Running statistics are those of the first replica. Repeatable.",
            "",
            "--per-replica",
            "--cross-batch",
        ),
    ] = None

    search: Annotated[
        str | None,
        word(
            SEARCH,
            "ALGORITHM",
            "The algorithm; the others: plan help search. They are recursive_programming, ilp, exhaustive, and"
            " sharding_propagation, which spreads what --shard says (docs/questions.md).",
            "dynamic_programming",
            known=completion.algorithms,
        ),
    ] = None
    objective: Annotated[
        str | None,
        word(
            SEARCH,
            "WORD",
            "Minimize time, memory or cost. time: of a step; memory: per device; cost: device-seconds,"
            " which may use fewer devices.",
            "time",
            known=completion.objectives,
        ),
    ] = None
    top: Annotated[int | None, number(SEARCH, "Show the N best plans.", "1", most=1000)] = None
    simplicity: Annotated[
        str | None,
        word(
            SEARCH,
            "PERCENT",
            "Prefer simpler plans up to this much slower. 0 takes the fastest, however intricate."
            " A plan is as simple as what has to be said to write it down. The proof is about the fastest all the"
            " same.",
            "1%",
        ),
    ] = None
    pareto: Annotated[bool, switch(SEARCH, "--pareto", "Show the Pareto front of time against memory.")] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop then, with the best plan so far and its gap. The limit holds for the whole command,"
            " tracing included.",
            min=0.0,
            rich_help_panel=SEARCH,
        ),
    ] = None
    memory_limit: Annotated[
        str | None, word(SEARCH, "SIZE", "Memory per device that the plan may use, as in 64GiB.")
    ] = None
    memory_margin: Annotated[
        str | None,
        word(
            SEARCH,
            "SHARE",
            "Share of the peak left free for its error, as in 5%. 0% fills the device. Where not given,"
            " it is what the errors of measured runs with the training stack ask for.",
        ),
    ] = None
    planner_memory: Annotated[
        str | None,
        word(
            SEARCH,
            "SIZE",
            "Memory that the planner itself may use, as in 8GiB. Where it is reached, it answers with the"
            " best plan so far. Where not given, it is most of what is available.",
        ),
    ] = None
    rule_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of sharding rules found by trial. Operators that docs/operators.md does not list get"
            " rules by trial, a second each; cached ones are verified.",
        ),
    ] = None
    graph_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of traced graphs, of zoo models and config.json; none keeps none. It is keyed by sources and"
            " versions. PLAN_GRAPH_CACHE=none does the same (where not given: ~/.cache/parallel-planner/graphs).",
        ),
    ] = None
    certify: Annotated[
        bool, switch(SEARCH, "--certify", "Check the slowest pipeline rank with an integer program.")
    ] = False

    explain: Annotated[
        bool, switch(OUTPUT, "--explain", "Say what limits the plan, and what the next best would cost.")
    ] = False
    layouts: Annotated[
        bool, switch(OUTPUT, "--layouts", "Show sharding as factors and layouts in place of the names of patterns.")
    ] = False
    output: Annotated[str | None, word(OUTPUT, "FILE", "Where to write the plan file.", "", "-o", "--output")] = None
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
        return self.hardware or DEFAULT_HARDWARE

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
