"""The command for the job of a plan, with no decision fixed: a plan file does not store which decisions were given."""

import shlex

from planner.fp8_recipes import HISTORY
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import ALL_LAYERS
from planner.plan.plan import Plan


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
    words += ["--imbalance", f"{training.imbalance:g}"] if training.imbalance != EVEN else []
    words += ["--tokens-once", "1"] if training.tokens_once else []
    words += _alltoall_words(plan)
    words += [word for pattern, place in training.update.placed for word in ("--place", f"{pattern}={place}")]
    words += [word for pattern, number in training.update.padded for word in ("--pad", f"{pattern}={number}")]
    if training.update.padding_samples:
        words += ["--pad", f"batch={training.padded_batch}"]
    update = training.update
    words += [word for pattern in update.per_replica for word in ("--per-replica", f"{pattern}={update.replicas}")]
    words += ["--zero-by", training.update.zero_by] if training.update.owned else []
    clip = training.update.clip_norm
    words += ["--clip-norm", f"{clip:g}"] if clip is not None else []
    return shlex.join(words)


def _alltoall_words(plan: Plan) -> list[str]:
    """Options on links with the all-to-all."""
    links = plan.links_with_alltoall
    return [] if links is True else ["--alltoall-on", "node"] if links else ["--no-alltoall"]
