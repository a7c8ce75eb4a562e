"""What counts as a fact that a message states, and that a message without it fails the test."""

from pathlib import Path

import pytest

from planner.errors import InfeasibleError, LimitError, RequestError
from tests.refusals import refused, says

MESSAGE = (
    "/tmp/a/plan.json: '--mesh' (2, 4) takes 8 of 1,024 devices, not 0..3, at 4.5 GiB; "
    "did you mean llama-tiny or *.bias? `plan show plan.json`: num_heads=12, x: -7; see --help."
)


@pytest.mark.parametrize(
    "fact",
    [
        "/tmp/a/plan.json", Path("/tmp/a/plan.json"), "plan.json", "--mesh", "(2, 4)", 2, 4, 8, "1,024", 0, 3, 4.5,
        "4.5 GiB", "llama-tiny", "*.bias", "plan show plan.json", "num_heads=12", "num_heads", 12, "x", -7, "--help",
        "did you mean llama-tiny or *.bias",
    ],
)  # fmt: skip
def test_a_fact_stands_alone(fact: object) -> None:
    says(MESSAGE, fact)


@pytest.mark.parametrize(
    "fact",
    [
        "--mes", "mesh", "/tmp/a", "a", 5, 1, 24, "024", 7, "tiny", "llama", "bias", ".bias",
        "--mesh-order", "--MESH", "num", "heads", 1.5, 42, "4.5GiB", "show plan", "elsewhere",
    ],
)  # fmt: skip
def test_a_part_of_a_word_or_number_is_no_fact(fact: object) -> None:
    with pytest.raises(AssertionError, match="not said"):
        says(MESSAGE, fact)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("42 of 4.5", 4), ("a factor of -4", 4), ("llama-4", 4), ("4e+07 choices", 4), ("5/2 samples", 2),
        ("4x8", 8), ("layers.4.bias", 4), ("4,096 rows", 4), ("4,096 rows", "096"), ("--mesh-order 4", "--mesh"),
        ("--no-mesh", "--mesh"), ("node=8@300", 8), ("package.module:factory", "factory"), ("plan.json:12", 12),
        ("plan.json/x", "plan.json"), ("*q_proj*", "q_proj"), ("planes", "plan"), ("explan", "plan"),
    ],
)  # fmt: skip
def test_near_misses(text: str, fact: object) -> None:
    with pytest.raises(AssertionError, match="not said"):
        says(text, fact)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("4,8", 4), ("4,8", 8), ("(4)", 4), ("at 4.", 4), ("4: none", 4), ("is 4?", 4), ("'4'", 4), ("num_heads=4", 4),
        ("4%", 4), ("a.json: gone", "a.json"), ("in a.json.", "a.json"), ("a/b/c.json", "c.json"), ("R,S1", "S1"),
        ("--mesh=4", "--mesh"), ("aten.flip.default(1)", "aten.flip.default"), ("4,0961", 4),
    ],
)  # fmt: skip
def test_signs_that_may_stand_beside_a_fact(text: str, fact: object) -> None:
    says(text, fact)


def test_a_repeated_fact_stands_there_as_often() -> None:
    says("rank 4 of 4", 4, "rank", 4)
    with pytest.raises(AssertionError, match="4"):
        says("rank 4 of 42", 4, 4)


def test_a_failure_names_what_is_missing_and_shows_the_message() -> None:
    with pytest.raises(AssertionError) as caught:
        says("--devices 12: h100-80gb", "--devices", 8, "h100", 12)
    assert str(caught.value) == "not said: '8', 'h100'\nin: --devices 12: h100-80gb"


@pytest.mark.parametrize("facts", [(), ("",), ("--devices", "")])
def test_nothing_is_no_fact(facts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="fact"):
        says("--devices 12", *facts)


def test_a_refusal_has_its_kind_and_its_facts() -> None:
    with refused(RequestError, "--devices", 12) as caught:
        raise RequestError("--devices 12: too many")
    assert caught.value.exit_code == 2


def test_what_is_missing_in_a_refusal_fails() -> None:
    with pytest.raises(AssertionError, match="12"), refused(RequestError, "--devices", 12):
        raise RequestError("--devices 128: too many")


def test_another_kind_passes_through() -> None:
    with pytest.raises(InfeasibleError, match="12"), refused(LimitError, 12):
        raise InfeasibleError("12")


def test_no_refusal_at_all_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="LimitError"), refused(LimitError, 12):
        pass
