"""Routers: what is chosen, how it is weighed, and how loads are kept even."""

from dataclasses import replace

import pytest
import torch

from planner.errors import ModelError
from planner.models.experts.router import Router, Routing, expert_loads
from tests.refusals import refused

B, S, E, K = 3, 16, 8, 2


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(B, S, E, generator=torch.Generator().manual_seed(seed))


def test_softmax_scores_are_weights_as_they_are() -> None:
    weights, chosen, loss = Router(E, Routing(chosen=K, normalised=False))(logits())
    best = logits().softmax(-1).topk(K)
    assert loss is None
    torch.testing.assert_close((weights, chosen), (best.values, best.indices))


def test_sigmoid_scores_are_normalised_and_scaled() -> None:
    weights, chosen, _ = Router(E, Routing(chosen=K, scores="sigmoid", scale=2.5))(logits())
    best = logits().sigmoid().topk(K)
    torch.testing.assert_close(weights, 2.5 * best.values / best.values.sum(-1, keepdim=True))
    torch.testing.assert_close(chosen, best.indices)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    router = Router(E, Routing(chosen=K, scores="sigmoid", normalised=False, bias_speed=0.5))
    router.bias_steps[3] = 4
    weights, chosen, _ = router(logits())
    assert (chosen == 3).any(-1).all()
    torch.testing.assert_close(weights, logits().sigmoid().gather(-1, chosen))


@pytest.mark.parametrize("groups_by", [1, 2])
def test_only_experts_of_the_best_groups_are_chosen(groups_by: int) -> None:
    router = Router(E, Routing(chosen=3, groups=4, chosen_groups=2, groups_by=groups_by))
    _, chosen, _ = router(logits())
    scores = logits().softmax(-1).unflatten(-1, (4, 2))
    best = (scores.amax(-1) if groups_by == 1 else scores.sum(-1)).topk(2).indices
    assert (chosen // 2).unsqueeze(-1).eq(best.unsqueeze(-2)).any(-1).all()
    whole = Router(E, Routing(chosen=3))(logits())
    assert not torch.equal(whole.chosen, chosen)


def test_the_loss_over_a_batch_is_that_of_switch_transformers() -> None:
    _, chosen, loss = Router(E, Routing(chosen=K, loss=0.1))(logits())
    share = torch.bincount(chosen.flatten(), minlength=E) / chosen.numel()
    torch.testing.assert_close(loss, 0.1 * E * (share * logits().softmax(-1).mean((0, 1))).sum())


def test_the_loss_over_sequences_is_the_mean_of_theirs() -> None:
    routing = Routing(chosen=K, scores="sigmoid", loss=0.1, loss_over="sequence")
    loss = Router(E, routing)(logits()).loss
    each = [Router(E, routing)(logits()[at : at + 1]).loss for at in range(B)]
    batch = Router(E, replace(routing, loss_over="batch"))(logits()).loss
    torch.testing.assert_close(loss, torch.stack(each).mean())
    assert not torch.isclose(loss, batch)
    alone = Router(E, replace(routing, loss_over="batch"))(logits()[:1]).loss
    torch.testing.assert_close(each[0], alone)


def test_even_loads_have_the_least_loss() -> None:
    even = torch.eye(E)[torch.arange(B * S) % E].view(B, S, E) * 10
    routing = Routing(chosen=1, loss=1.0)
    assert Router(E, routing)(even).loss == pytest.approx(1.0)
    assert Router(E, routing)(even[:, :1].expand(B, S, E)).loss > 2


def test_biases_move_against_the_loads_of_all_micro_batches() -> None:
    router = Router(E, Routing(chosen=K, bias_speed=0.1))
    chosen = torch.cat([router(logits(seed)).chosen for seed in range(2)])
    loads = torch.bincount(chosen.flatten(), minlength=E)
    assert torch.equal(router.loads, loads)
    after = router.after_step(dict(router.named_buffers()))
    assert torch.equal(after["bias_steps"], torch.sign(2 * B * S * K - E * loads))
    assert not after["loads"].any()


def test_biases_even_out_loads_and_outlive_a_conversion_to_16_bits() -> None:
    router = Router(E, Routing(chosen=K, scores="sigmoid", bias_speed=0.01)).bfloat16()
    skewed = logits().bfloat16() + torch.linspace(0, 3, E)
    spread = []
    for _ in range(200):
        router(skewed)
        spread.append(int(router.loads.max() - router.loads.min()))
        for name, content in router.after_step(dict(router.named_buffers())).items():
            getattr(router, name).copy_(content)
    assert spread[-1] < spread[0] / 2


def test_nothing_is_counted_while_a_model_is_evaluated() -> None:
    router = Router(E, Routing(chosen=K, bias_speed=0.1, loss=0.1)).eval()
    assert router(logits()).loss is None
    assert not router.loads.any()


def test_loads_are_counted_by_sample() -> None:
    chosen = torch.tensor([[[0, 1], [0, 2]], [[1, 1], [1, 3]]])
    assert expert_loads(chosen, 4).tolist() == [[2, 1, 1, 0], [0, 3, 0, 1]]


@pytest.mark.parametrize(
    ("routing", "facts"),
    [
        (Routing(chosen=9), (9, 8, 1, 8)),
        (Routing(chosen=2, groups=3), (8, 3, 2, 4)),
        (Routing(chosen=2, groups=4, chosen_groups=5), (5, 4)),
        (Routing(chosen=3, groups=4, chosen_groups=1), (3, 1, 2)),
        (Routing(chosen=1, groups=8, chosen_groups=2, groups_by=2), (1, 2)),
    ],
)
def test_a_routing_that_does_not_fit_the_experts(routing: Routing, facts: tuple[object, ...]) -> None:
    with refused(ModelError, *facts):
        Router(E, routing)
