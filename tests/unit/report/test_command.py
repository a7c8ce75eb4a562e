"""The command that a report shows plans the same job."""

from dataclasses import replace

import pytest

from planner.cli.values import parse_buckets
from planner.report.command import command_of
from planner.sharding.update import PLAIN, Update
from tests.distributed import plans


def command(update: Update) -> str:
    plan = plans.hand_plan("zero1", "gpt4", plans.mesh_of(2))
    return command_of(replace(plan, training=replace(plan.training, update=update)))


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (replace(PLAIN, gradients="sum"), "--gradients sum"),
        (replace(PLAIN, gradient_dtype="parameter"), "--gradient-dtype parameter"),
        (replace(PLAIN, moment_dtype="bf16"), "--moment-dtype bf16"),
        (replace(PLAIN, master_weights=False), "--no-master-weights"),
        (replace(PLAIN, clip_norm=1.0), "--clip-norm 1"),
        (replace(PLAIN, clip_norm=0.123456789), "--clip-norm 0.123456789"),
        (replace(PLAIN, broadcast=True), "--broadcast"),
        (replace(PLAIN, local_parameters=("*.norm", "b")), "--local-parameters '*.norm' --local-parameters b"),
        (replace(PLAIN, buckets=parse_buckets("20,35")), "--buckets 20,35"),
        (replace(PLAIN, buckets=parse_buckets("*attn*=0,*mlp*=1")), "--buckets '*attn*=0,*mlp*=1'"),
    ],
)
def test_it_asks_for_the_same_gradients_and_optimizer_states(update: Update, words: str) -> None:
    assert command(update).endswith(words)


def test_it_leaves_to_the_search_what_a_search_decides() -> None:
    assert command(replace(PLAIN, buckets=2**20, gathers="ahead")) == command(PLAIN)
    assert "--no-master-weights" not in command(PLAIN)
