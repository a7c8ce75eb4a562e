"""What a planner of parallel training is asked to do, row by row, and what shows that it is done.

Each row has evidence of two kinds. A command that a user would type, with what it has to say, and an exit code where
that is not 0: commands run in the order of the rows in one folder, so that later ones read what earlier ones wrote. And
tests of this repository, named by file and function. A row for which nothing is there has the command that would do it
all the same: the day that it works, the row says so. `run` starts processes, which takes longer.

    Row(12, "…", plan("show a.json", "degrees"), test("unit/cli/test_diff.py::test_…"))
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A call of `plan`, the words that its output has to have (regular expressions), and the exit code."""

    words: str
    says: tuple[str, ...] = ()
    code: int = 0
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """A test function, below tests/."""

    node: str


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is asked for, in a few words, and its evidence."""

    number: int
    what: str
    evidence: tuple[Command | Test, ...]


def plan(words: str, *says: str, code: int = 0) -> Command:
    return Command(words, says, code)


def run(words: str, *says: str, code: int = 0) -> Command:
    return Command(words, says, code, runs=True)


def test(node: str) -> Test:
    return Test(node)


def row(number: int, what: str, *evidence: Command | Test) -> Row:
    return Row(number, what, evidence)


TINY = "--model llama-tiny --hardware cpu --devices 4"
ODD = (
    "--model llama-tiny --set num_heads=6 --set num_kv_heads=3 --set hidden_size=192 --set num_layers=2"
    " --hardware cpu --seq-len 32 --devices 2 --tensor 2"
)
PAIR = "--model llama-tiny --hardware cpu --devices 2 --global-batch 4"
AGREES = "agrees with the unsharded model"
NO_BACKWARD = r"\A(?![\s\S]*\nbackward )"

ROWS = (
    row(1, "modes: one device, data, hybrid, semi-automatic, automatic, by hand",
        plan("--model llama-tiny --hardware cpu --mode stand_alone"),
        plan(f"{TINY} --mode data_parallel -o data.json", r"data 4"),
        plan(f"{TINY} --mode hybrid_parallel --tensor 2 --pipeline 1 --data 2 --zero 1 --micro-batches 2", "tensor 2"),
        plan(f"{TINY} --mode semi_auto_parallel --shard '*q_proj*=o' --mesh 4"),
        plan(f"{TINY} --mode auto_parallel -o a.json"),
        plan("--mode manual a.json", "legal and fits"),
        test("unit/cli/test_by_hand.py::test_an_edited_plan_runs_as_the_unsharded_model_does")),
    row(2, "search by dynamic programming, exact, with a bound",
        plan(f"{TINY} --search dynamic_programming", r"no plan in the search space|optimal"),
        test("contract/test_solvers.py::test_no_solver_beats_the_oracle_and_exact_ones_equal_it")),
    row(3, "search by recursion over axes, any number of devices",
        plan(f"{TINY} --search recursive_programming --mesh 2x2", "recursive_programming"),
        plan("--model llama-tiny --hardware cpu --devices 3 --global-batch 12 --search recursive_programming")),
    row(4, "strategies that a user gives for some operators spread to the others",
        plan(f"{TINY} --mesh 4 --shard '*q_proj*=o' --search sharding_propagation", "sharding_propagation"),
        test("unit/cli/test_by_hand.py::test_strategies_by_name")),
    row(5, "strategy files: plans, and MindSpore's, both ways",
        plan("export a.json --to mindspore -o mindspore", "Written to"),
        plan("import mindspore/strategy.json --from mindspore --model llama-tiny --hardware cpu --global-batch 16"
             " --micro-batches 1"),
        test("unit/export/test_mindspore_reading.py::test_operators_without_weights_are_kept_both_ways")),
    row(6, "any number of devices, and what each rank holds",
        plan("--model llama-tiny --hardware h100-80gb --devices 48 --global-batch 48 -o many.json"),
        plan("show many.json --rank 37", "37")),
    row(7, "backends by type of device", test("unit/runtime/test_device_mesh.py::*")),
    row(8, "start-up by torchrun, mpirun, Slurm, rank tables",
        test("distributed/test_launchers.py::test_under_mpirun"),
        test("distributed/test_launchers.py::test_under_the_variables_of_slurm"),
        test("distributed/test_launchers.py::test_under_a_rank_table"),
        test("unit/runtime/test_launchers.py::*")),
    row(9, "data parallelism, gradients reduced in buckets beside the backward pass",
        run("run data.json --steps 2", AGREES),
        test("distributed/test_updates.py::test_buckets_start_before_the_backward_pass_is_over")),
    row(10, "options for gradients: mean or sum, dtype, broadcast, accumulation",
        plan(f"{TINY} --gradients sum --gradient-dtype fp32 --broadcast --micro-batches 2"),
        test("distributed/test_updates.py::test_summed_gradients"),
        test("distributed/test_updates.py::test_gradients_have_the_dtype_that_is_said")),
    row(11, "communication fused by size, by index, by pattern",
        plan(f"{TINY} --buckets 1MiB"), plan(f"{TINY} --buckets 20,35"),
        test("distributed/test_updates.py::test_buckets_change_no_sum")),
    row(12, "equal communication subgraphs are found and reused",
        test("unit/runtime/test_groups.py::*"), test("unit/runtime/test_lowering.py::*")),
    row(13, "operators split over devices",
        plan(f"{TINY} --tensor 4", "tensor 4"), test("distributed/test_parity.py::test_random_plans_on_a_square_mesh")),
    row(14, "norms along the sequence beside tensor parallelism",
        plan(f"{TINY} --tensor 4 --sequence-parallel"),
        test("distributed/test_training.py::test_a_megatron_plan_communicates_as_megatron_does")),
    row(15, "context parallelism by rings, by heads, by both",
        plan(f"{TINY} --context 4 --context-by ring"), plan(f"{TINY} --context 4 --context-by heads"),
        plan(f"{TINY} --context 4 --context-by hybrid --ulysses 2"),
        test("distributed/test_context.py::test_a_sequence_that_is_split_changes_nothing")),
    row(16, "pipelines: GPipe, 1F1B, interleaved, zero bubble, PipeDream, slices of the sequence",
        *(plan(f"{TINY} --pipeline 2 --micro-batches 4 --schedule {name}", name)
          for name in ("gpipe", "interleaved_1f1b", "zb_h1", "pipedream", "pipedream_2bw")),
        plan(f"{TINY} --pipeline 2 --micro-batches 4 --schedule seqpipe --slices 2", "seqpipe"),
        plan(f"{TINY} --pipeline 2 --micro-batches 4 --slices 2 --virtual-stages 2", "seqpipe"),
        test("distributed/test_schedules.py::test_schedules_on_two_processes")),
    row(17, "optimizer states, gradients, weights shared out, in groups too",
        *(plan(f"{TINY} --data 4 --zero {stage}", f"ZeRO {stage}") for stage in (1, 2, 3)),
        plan(f"{TINY} --data 4 --zero 3 --replicas 2"),
        test("distributed/test_training.py::test_five_steps_equal_the_unsharded_optimizer")),
    row(18, "one micro-batch computes while another communicates",
        plan(f"{TINY} --tensor 4 --micro-batches 2 --interleave 2"),
        test("distributed/test_schedules.py::test_schedules_on_four_processes")),
    row(19, "recomputation: none, by operator, by block, of some blocks",
        *(plan(f"{TINY} --recompute {word}") for word in ("none", "selective", "full")),
        test("distributed/test_parity.py::test_other_meshes_micro_batches_and_recomputation")),
    row(20, "each rank reads its samples, or the whole batch",
        test("distributed/test_launch.py::test_a_dataset_is_read_whole_or_in_pieces_alike"),
        test("distributed/test_batches.py::test_other_plans_go_on_with_the_same_samples"),
        plan(f"{TINY} --data 4 --cross-batch '*cross_entropy*' -o replicas.json", "each of 4 replicas"),
        plan("verify replicas.json", "^legal; "),
        run("run replicas.json --steps 1", AGREES),
        test("distributed/test_per_replica.py::test_four_processes_compute_what_replicas_do")),
    row(21, "parameters that the user shards alone",
        plan(f"{TINY} --data 4 --local-parameters '*norm*'"),
        test("distributed/test_updates.py::test_local_parameters_are_each_ranks_own")),
    row(22, "large cheap operators on the host",
        plan("--model wide-deep --hardware h100-80gb --devices 2 --place auto"),
        plan("--model llama8b --hardware ascend-910b-64gb --devices 8 --place 'model.embed_tokens.weight=host'"
             " --tensor 1 --pipeline 1 --recompute full"),
        test("distributed/test_placed.py::test_tables_on_the_host")),
    row(23, "states, weights, activations on the host or a disk",
        plan(f"{TINY} --offload optimizer", "optimizer states on the host"),
        plan("--model llama8b --hardware ascend-910b-64gb --devices 8 --offload optimizer --tensor 1 --pipeline 1"
             " --recompute full", "optimizer states on the host"),
        test("distributed/test_offload.py::test_offloaded_states_change_nothing"),
        test("distributed/test_offload.py::test_offloaded_weights_change_nothing")),
    row(24, "parameter servers for embeddings",
        test("distributed/test_servers.py::test_dlrm_on_two_workers_and_two_servers_is_the_unsharded_model")),
    row(25, "checkpoints, merged and sliced, loaded under another plan, converted",
        plan(f"{PAIR} --mesh 2 -o pair.json"),
        run("run pair.json --steps 2 --no-check --save saved"),
        run("checkpoint inspect saved"), run("checkpoint merge saved -o merged"),
        test("distributed/test_saving.py::test_another_plan_goes_on_from_the_same_weights")),
    row(26, "a killed worker loses nothing, from checkpoints or from replicas",
        test("distributed/test_recovery.py::test_a_killed_worker_changes_nothing"),
        test("distributed/test_copies.py::test_any_host_may_be_lost"),
        test("distributed/test_recovery.py::test_two_agents_of_torchrun_restart"),
        test("unit/runtime/test_attempt.py::*")),
    row(27, "expert parallelism",
        plan("--model mixtral-tiny --hardware cpu --devices 4 --expert 4 --data 4", "expert 4"),
        test("distributed/test_experts.py::test_ways_to_divide_experts")),
    row(28, "clusters described with sources, and calibrated",
        plan("profiles", "ascend-910b-64gb"), plan("profiles h100-80gb", "datasheet"),
        test("unit/cli/test_calibrating.py::test_from_measuring_to_a_profile")),
    row(29, "the published configuration of Llama 3.1 70B, read, priced, written back as it was",
        plan("import {data}/published/mindformers/finetune_llama3_1_70b.yaml --from mindformers --model llama70b"
             " --hardware ascend-910b-64gb -o seeds.json"),
        plan("export seeds.json --to mindformers -o seeds --nearest"
             " --onto {data}/published/mindformers/finetune_llama3_1_70b.yaml"),
        test("unit/export/test_onto.py::test_what_was_imported_comes_back_as_it_was")),
    row(30, "any PyTorch model traced; placements explained; plans compared",
        plan("explain a.json '*.mlp.up_proj/linear' --no-search", "split as"),
        plan("diff a.json data.json"), test("unit/graph/test_trace.py::*")),
    row(31, "stages, states, recomputation, offload and micro-batches chosen together",
        plan("--model gpt-tiny --hardware h100-80gb --devices 8 --offload auto"),
        test("unit/search/test_never_loses_to_people.py::*")),
    row(32, "several kinds of devices",
        plan("--model llama-tiny --hardware h100-80gb:8,a100-80gb:8 --global-batch 64 -o mixed.json"),
        test("distributed/test_mixed.py::test_a_plan_for_two_kinds_of_devices_computes_the_same")),
    row(33, "predictions checked against measured runs, row by row",
        test("unit/cli/test_validate.py::test_json"), test("validation/test_published_figures.py::*")),
    row(34, "planning for hardware that is not at hand",
        plan("--model llama-tiny --hardware b200 --devices 8"), plan("estimate a.json --hardware h100-80gb")),
    row(35, "one command, seconds, a front of time and memory, ready settings",
        plan(f"{TINY} --pareto"), plan("export a.json --to torchtitan -o titan --nearest", "Written to")),
    row(36, "timelines and a page to look at",
        plan("report a.json -o page.html --no-search"),
        test("unit/cli/test_report.py::test_a_page_and_a_trace_of_a_plan")),
    row(37, "readable code or configurations are made of a plan",
        plan("export data.json --to torch -o script --nearest", "train.py"),
        test("distributed/test_torch_script.py::test_the_script_trains_as_the_unsharded_model")),
    row(38, "blocks that are run unlike each other",
        test("unit/plan/test_verify.py::test_one_block_can_differ"),
        test("distributed/test_deepseek.py::test_stages_hold_blocks_of_any_kind")),
    row(39, "a proof with every answer, and an independent check",
        plan("verify a.json", "no plan on 4 devices takes less than"),
        test("unit/plan/test_least_work.py::*"), test("unit/search/test_bounds.py::*")),
    row(40, "predictions with intervals, and a peak that is an upper bound",
        plan("show a.json", "80% interval"),
        test("distributed/test_peak.py::test_a_process_stays_below_what_is_predicted")),
    row(41, "answers that help where nothing fits",
        plan("--model llama70b --hardware h100-80gb --devices 2 --time-limit 20", code=3),
        test("unit/cli/test_infeasible.py::test_it_says_at_which_rank_the_bytes_are_missing")),
    row(42, "a plan proved on a laptop before a cluster is booked",
        plan("audit a.json", "equal|agree"), plan("prove many.json")),
    row(43, "some steps run, compared term by term, refitted, planned again",
        run("run pair.json --steps 5 --no-check --measure run.json"), run("compare pair.json run.json"),
        run("fit run.json -o mine.toml")),
    row(44, "operators without a rule get one by trial",
        test("contract/test_discovery.py::*"), test("distributed/test_parity.py::test_rules_found_by_trial")),
    row(45, "one plan, many engines, both ways, offload too",
        *(plan(f"export data.json --to {name} -o to-{name} --nearest", "Written to")
          for name in ("megatron", "mindspeed", "nemo", "torchtitan", "deepspeed", "accelerate", "mindformers")),
        test("unit/export/test_targets.py::test_what_an_engine_says_is_read_back"),
        test("unit/export/test_published.py::test_what_deepspeed_offloads_is_part_of_the_description")),
    row(46, "what binds, what choices cost, sensitivities",
        plan("explain a.json --no-search", "Most of the step is", "devices +x 2"),
        test("unit/cli/test_explain.py::test_more_devices_take_fewer_micro_batches_where_samples_are_few")),
    row(47, "devices are lost: another plan, the checkpoint resharded",
        plan(f"{TINY} --global-batch 8 -o four.json"),
        run("run four.json --steps 2 --save lost", AGREES),
        plan("--model llama-tiny --hardware cpu --devices 2 --global-batch 8 -o two.json"),
        run("run two.json --steps 4 --resume lost", AGREES),
        test("distributed/test_recovery.py::test_kills_and_changes_of_devices"),
        test("distributed/test_copies.py::test_a_plan_for_other_degrees_goes_on")),
    row(48, "inference and evaluation: plans of the forward pass alone",
        plan(f"{TINY} --forward-only -o forward.json", r"forward +[\d.]+ m?s +9\d", NO_BACKWARD),
        plan("verify forward.json", "^legal; "),
        run("run forward.json --steps 1", AGREES),
        test("distributed/test_evaluation.py::*")),
    row(49, "parameter servers for dense parameters",
        plan(f"{TINY} --mode parameter_server -o served.json", "parameter servers", "kept on the host"),
        plan("audit served.json", "host_link", "rows equal"),
        run("run served.json --steps 2", AGREES),
        test("distributed/test_updates.py::test_owners_of_whole_parameters_equal_the_unsharded_optimizer")),
    row(50, "data parallelism as the default of the semi-automatic mode",
        plan(f"{TINY} --mode semi_auto_parallel --shard '*mlp.up_proj*=o' --mesh 4 --default data_parallel",
             r"\nmlp\.up_proj +column parallel", r"mlp\.down_proj.* +data parallel"),
        test("unit/cli/test_by_hand.py::test_operators_that_nobody_decided_are_data_parallel")),
    row(51, "dims that do not divide, cut unevenly or padded",
        plan("--model llama-tiny --set vocab_size=1001 --hardware cpu --devices 2 --tensor 2 --pad lm_head.weight=2"
             " --pad model.embed_tokens.weight=2 -o padded.json", "vocabulary parallel"),
        plan("audit padded.json", "rows equal"),
        run("run padded.json --steps 1", AGREES),
        plan(f"{ODD} -o whole.json", r"layers\.self_attn +replicated"),
        plan(f"{ODD} --pad auto -o heads.json", r"layers\.self_attn +head parallel"),
        plan("audit heads.json", "rows equal"),
        run("run heads.json --steps 1", AGREES),
        plan("--model llama-tiny --hardware cpu --devices 4 --data 4 --global-batch 97 -o uneven.json", "data 4"),
        plan("--model llama-tiny --hardware cpu --devices 4 --data 4 --global-batch 97 --seq-len 32 --pad batch=4"
             " -o batch.json", "global batch 97 padded to 100"),
        plan("audit batch.json", "rows equal"),
        run("run batch.json --steps 1", AGREES),
        plan("--model llama-tiny --hardware h100-80gb --devices 4 --data 4 --global-batch 97 --pad batch=4"
             " --for megatron", code=2),
        test("unit/search/test_padded_requests.py::test_a_batch_is_padded_from_python"),
        test("distributed/test_padding.py::test_padded_weights_train_as_the_unsharded_model"),
        test("distributed/test_padding.py::test_a_padded_batch_trains_as_the_unsharded_model_on_its_samples")),
    row(52, "the optimizer shared out by whole parameters, with broadcasts",
        plan(f"{TINY} --data 4 --zero 1 --zero-by parameters -o owned.json", "broadcast"),
        plan("audit owned.json", "broadcast", "rows equal"),
        run("run owned.json --steps 1", AGREES),
        plan(f"{TINY} --data 4 --zero 1 --zero-by auto -o either.json"),
        test("distributed/test_updates.py::test_owners_of_whole_parameters_equal_the_unsharded_optimizer")),
    row(53, "all-to-all replaced where a link or backend has none",
        plan("--model mixtral-tiny --hardware cpu --devices 4 --no-alltoall --data 2 --tensor 2 -o gathered.json",
             "degrees +data 2 x tensor 2"),
        plan("--model llama-tiny --hardware cpu --devices 4 --context 2 --alltoall-on auto"),
        test("unit/search/test_alltoall_choice.py::*"),
        test("distributed/test_alltoall.py::*"),
        plan("audit gathered.json", r"\A(?![\s\S]*all_to_all)[\s\S]*rows equal"),
        run("run gathered.json --steps 1", AGREES)),
    row(54, "attention masks as kinds, never materialised",
        test("unit/graph/test_masks.py::test_a_mask_is_kept_as_what_it_says"),
        test("unit/runtime/test_windowed_attention.py::test_slices_make_what_the_whole_sequence_does"),
        test("distributed/test_brought_models.py::test_masks_that_are_known_by_their_kind_are_cut")),
    row(55, "searched within what an engine can say",
        plan("--model llama-tiny --hardware h100-80gb --devices 8 --for megatron -o engine.json",
             r"no plan in the search space of Megatron-LM"),
        plan("export engine.json --to megatron -o engine", "Written to"),
        plan("import engine --from megatron --model llama-tiny --hardware h100-80gb -o again.json",
             "Plan written to again.json"),
        plan("diff engine.json again.json", "The plans decide the same")),
    row(56, "advice on a configuration of the user's",
        plan("--model llama-tiny --hardware h100-80gb --devices 8 --data 8 --zero 3 --micro-batches 4 --recompute full"
             " -o advised.json", "ZeRO 3"),
        plan("export advised.json --to deepspeed -o advised --nearest", "Written to"),
        plan("advise advised --model llama-tiny --hardware h100-80gb --time-limit 10",
             r"Changes, cheapest to make first[\s\S]*saves[\s\S]*[\d.]+ ms"),
        test("unit/cli/test_advise.py::test_what_is_changed_saves_and_the_rest_stays")),
    row(57, "hardware, engines, device counts compared; days and money",
        plan("compare --model llama-tiny --hardware h100,a100-80gb --devices 8 --tokens 1B --price h100=2.5"
             " --price a100-80gb=1.5", "[Cc]heapest", r"device-hours"),
        plan("capacity --model llama-tiny --hardware h100 --tokens 1B --days 1",
             r"8 x h100-80gb train it in [\d.]+ of 1 days")),
    row(58, "8-bit floating point as a choice",
        plan("--model llama8b --hardware h100-80gb --devices 8 --precision fp8 -o fp8.json",
             r"bf16 with linear layers in fp8 \(tensorwise"),
        plan("verify fp8.json", "^legal and fits|^legal; "),
        test("distributed/test_fp8.py::*")),
    row(59, "communication hidden, the hidden share predicted and measured",
        plan(f"{TINY} --gathers ahead --data 4 --zero 3", r"overlapped gathers and reductions +-[\d.]+ m?s +-[\d.]+%"),
        test("contract/test_gathers_ahead.py::*")),
    row(60, "a live page",
        plan("ui --help", r"served to this machine alone \(127\.0\.0\.1\)"),
        test("unit/ui/test_server.py::test_a_search_goes_through_and_everything_is_offered_of_it")),
)  # fmt: skip
