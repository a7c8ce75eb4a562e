"""A profile that runs correct: by how much, by how many, and that predictions follow."""

from dataclasses import replace
from pathlib import Path

import pytest

from costmodels import AttentionShape, attention_time, operator_time
from hardware_profiles import Cluster, UnknownProfileError, load_profile
from hardware_profiles.corrections import Corrections, corrected_profile
from hardware_profiles.load import parse_profile
from hardware_profiles.run_record import CollectiveCalls, MeasuredRun
from planner.errors import RequestError
from planner.plan.compare.corrections import corrections_of, factors_of, noise
from planner.plan.compare.measured import predicted_terms, run_plan
from tests.refusals import refused
from tests.unit.plan.test_measured import plan, rank, run


def slower(times: float, messages: float = 1.0) -> MeasuredRun:
    """A run whose kernels took so many times what was predicted, and its collectives."""
    said = predicted_terms(plan().prediction)
    found = {name: times * seconds for name, seconds in said.items()}
    found |= {name: messages * said[name] for name in ("communication", "reduction")}
    return run(rank(**found))


def test_factors_are_about_the_geometric_mean_of_the_runs_that_say_something() -> None:
    factors = {one.name: one for one in factors_of([slower(2.0, 4.0), slower(8.0, 4.0)])}
    assert factors["compute"].value == pytest.approx(1 / 4, rel=0.05)
    assert (factors["compute"].low, factors["compute"].high) == (pytest.approx(1 / 8), pytest.approx(1 / 2))
    assert factors["messages"].value == pytest.approx(1 / 4, rel=0.1)  # a short term: not all of it is believed
    assert factors["update"].value is None  # less than a fiftieth of the step
    assert factors["update"].runs == 0


def test_a_term_that_is_shorter_than_steps_differ_by_corrects_next_to_nothing() -> None:
    """Collectives of a few percent of a step that took a third of what was predicted made links three times as fast."""
    steady = slower(1.5, 0.3)
    whole = sum(steady.ranks[0].seconds.values())
    steady = replace(steady, step_seconds=(whole,) * 8)
    restless = replace(steady, step_seconds=tuple(whole * share for share in (0.7, 0.85, 1.0, 1.15, 1.3)))
    once = replace(steady, step_seconds=(whole,))
    assert noise(steady) == pytest.approx(0.02 * whole)
    assert noise(restless) > noise(once) > noise(steady)
    found = [{one.name: one.value for one in factors_of([record])} for record in (steady, once, restless)]
    messages = [one["messages"] or 1.0 for one in found]
    assert 3 > messages[0] > messages[1] >= messages[2] >= 1
    assert messages[2] < 1.1
    assert found[0]["compute"] == pytest.approx(1 / 1.5, rel=0.01)
    assert found[2]["compute"] == pytest.approx(1 / 1.5, rel=0.1)


def test_collectives_under_computation_say_nothing_of_links() -> None:
    """Buckets of gradients that took half of what was predicted made links 1.4 times as fast: what was left of them."""
    steady = replace(slower(1.0, 4.0), step_seconds=(0.2,) * 8)
    for call, phase, said in (("wait", "update", False), ("wait", "", True), ("all_reduce", "update", True)):
        calls = (CollectiveCalls(phase=phase, call=call, calls=4, seconds=0.01, nbytes=0),)
        (messages,) = (one for one in factors_of([replace(steady, collectives=calls)]) if one.name == "messages")
        assert (messages.value is not None) == said, (call, phase)


def test_runs_of_several_machines_are_not_mixed() -> None:
    other = slower(2.0)
    elsewhere = replace(other, plan=replace(run_plan(plan()), profile="h100-80gb"))
    with refused(RequestError, "2 profiles", "cpu", "h100-80gb"):
        factors_of([other, elsewhere])


def test_a_run_counts_once() -> None:
    with refused(RequestError, "runs 1 and 3", "once"):
        factors_of([slower(2.0), slower(3.0), slower(2.0)])


def test_runs_that_say_nothing_correct_nothing() -> None:
    """They made a profile that was said to be corrected, with the old numbers."""
    said = replace(run_plan(plan()), predicted=dict.fromkeys(predicted_terms(plan().prediction), 0.0))
    with refused(RequestError, "nothing can be corrected", "does nothing else"):
        factors_of([replace(slower(2.0), plan=said)])


def test_a_corrected_profile_takes_as_long_as_was_measured(tmp_path: Path) -> None:
    record = slower(1.6, 3.0)
    text = corrected_profile("cpu", corrections_of([record], factors_of([record])), "mine", "of a test")
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    found = load_profile(path).with_devices(4)
    assert found.name == "mine"
    (fact,) = (one for one in found.facts if one.key == "level.0.bandwidth_gb_per_s")
    assert fact.kind == "fitted"
    assert "1 run on a processor" in fact.source
    assert "[was: two-core x86 machine" in fact.source
    assert seconds(found) == pytest.approx(1.6 * seconds(load_profile("cpu")), rel=0.05)
    before, after = load_profile("cpu").levels[0], found.levels[0]
    assert after.bandwidth == pytest.approx(before.bandwidth / 3, rel=0.05)
    assert after.latency == pytest.approx(3 * before.latency, rel=0.05)


def seconds(cluster: Cluster) -> float:
    """Of a kernel that is bound by its bytes, and launched."""
    return float(
        operator_time(
            op_class="elementwise", flops=0.0, bytes_moved=1e6, dtype="fp32", device=cluster.device, kernels=1.0
        )
    )


def test_kernels_faster_than_the_peak_raise_it() -> None:
    fast = Corrections(factors={"compute": 1.5}, source="a test")
    text = corrected_profile("cpu", fast, "mine", "of a test")
    before, after = load_profile("cpu").device, parse_profile(text.encode(), "text").device
    assert after.peak("fp32") > before.peak("fp32")
    rate = after.peak("fp32") * after.efficiency("matmul").compute
    assert rate == pytest.approx(1.5 * before.peak("fp32") * before.efficiency("matmul").compute, rel=1e-4)
    assert max(after.efficiency(name).compute for name, _ in after.efficiencies) <= 1


def test_attention_is_corrected_once() -> None:
    """The FLOP of a softmax beside those of its products say how widths of heads differ: scaled too, heads of 64 were
    corrected by 1.97 on H100 where all kernels were by 1.7."""
    fast = Corrections(factors={"compute": 1.7}, source="a test")
    text = corrected_profile("h100-80gb", fast, "mine", "of a test")
    before, after = load_profile("h100-80gb").device, parse_profile(text.encode(), "text").device
    for width in (64, 128, 192):
        shape = AttentionShape(
            batch=2, heads=8, key_heads=8, queries=2048, keys=2048, head_dim=width, value_dim=width, causal=True
        )
        times = [float(attention_time(shape, "bf16", one)) for one in (before, after)]
        assert times[0] / times[1] == pytest.approx(1.7, rel=1e-3)


def test_a_profile_that_is_not_there_is_named() -> None:
    with refused(UnknownProfileError, "none.toml", "--hardware"):
        corrected_profile("none.toml", Corrections(factors={}, source="a test"), "mine", "")
