"""The command for the job of a plan, with no decision fixed: a plan file does not store which decisions were given.
What the search decides only where it is told to stays as it is: how gradients are added up, what the optimizer keeps,
buckets of named parameters."""

import shlex

from planner.fp8_recipes import HISTORY
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import ALL_LAYERS
from planner.plan.plan import Plan
from planner.sharding.update import PLAIN, Update, bucket_numbers, split_positions


def command_of(plan: Plan) -> str:
    """`plan --model llama70b --devices 64 ...`, as one shell line."""
    model, training, cluster = plan.model, plan.training, plan.cluster
    words = ["plan", "--model", model.reference]
    words += ["--devices", str(cluster.devices)] if ":" not in cluster.profile else []
    words += ["--hardware", cluster.profile]
    words += ["--cluster", cluster.composition] if cluster.composition else []
    words += ["--software", cluster.software] if cluster.software != "pytorch" else []
    words += ["--seq-len", str(model.sequence_length)] if model.sequence_length else []
    words += ["--global-batch", str(training.global_batch), "--precision", training.precision]
    if plan.schedule_kind.trains:
        words += ["--optimizer", training.optimizer]
    else:
        words += ["--forward-only"]
    words += ["--fp8", training.fp8.recipe] if training.fp8 else []
    if training.fp8.delayed:
        words += ["--fp8-history", str(training.fp8.history)] if training.fp8.history != HISTORY else []
        words += ["--fp8-margin", str(training.fp8.margin)] if training.fp8.margin else []
    words += ["--fp8-layers", *ALL_LAYERS] if training.fp8 else []  # except those left out
    words += [word for pattern in training.fp8.left_out for word in ("--fp8-left-out", pattern)]
    words += ["--fp8-gathered"] if training.fp8.gathered else []
    words += ["--fp8-experts"] if training.fp8.experts else []
    words += ["--fp8-dispatch"] if training.fp8.dispatch else []
    words += ["--imbalance", _number(training.imbalance)] if training.imbalance != EVEN else []
    words += ["--tokens-once", "1"] if training.tokens_once else []
    words += _alltoall_words(plan)
    words += [word for pattern, place in training.update.placed for word in ("--place", f"{pattern}={place}")]
    words += [word for pattern, number in training.update.padded for word in ("--pad", f"{pattern}={number}")]
    if training.update.padding_samples:
        words += ["--pad", f"batch={training.padded_batch}"]
    update = training.update
    words += [word for pattern in update.per_replica for word in ("--per-replica", f"{pattern}={update.replicas}")]
    words += ["--zero-by", training.update.zero_by] if training.update.owned else []
    words += _gradient_words(update) if plan.schedule_kind.trains else []
    return shlex.join(words)


def _gradient_words(update: Update) -> list[str]:
    """Options on gradients and on what the optimizer keeps."""
    words = []
    for field in ("gradients", "gradient_dtype", "moment_dtype"):
        if (value := getattr(update, field)) != getattr(PLAIN, field):
            words += [f"--{field.replace('_', '-')}", value]
    words += [] if update.master_weights else ["--no-master-weights"]
    words += ["--clip-norm", _number(update.clip_norm)] if update.clip_norm is not None else []
    if update.composed:
        numbered = [f"{pattern}={number}" for pattern, number in bucket_numbers(update.buckets)]
        words += ["--buckets", ",".join(numbered or map(str, split_positions(update.buckets)))]
    words += ["--broadcast"] if update.broadcast else []
    return words + [word for pattern in update.local_parameters for word in ("--local-parameters", pattern)]


def _number(value: float) -> str:
    """The shortest text that reads as this number."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _alltoall_words(plan: Plan) -> list[str]:
    """Options on links with the all-to-all."""
    links = plan.links_with_alltoall
    return [] if links is True else ["--alltoall-on", "node"] if links else ["--no-alltoall"]
