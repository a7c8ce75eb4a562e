"""Settings of engines that would grow without end, nest without end, or say absurd numbers are refused."""

import time

import pytest

from planner.export.description import ExportError
from planner.export.files.arguments import options_in
from planner.export.files.yaml_files import settings_of
from planner.export.guessing import guessed_engine
from planner.export.target import Facts
from planner.export.targets import TARGETS
from tests.refusals import refused

FACTS = Facts(layers=4, devices=4, architecture=None)
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(n)}: &{chr(n)} [{','.join([f'*{chr(n - 1)}'] * 9)}]\n" for n in range(98, 114)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{chr(n)}: &{chr(n)} {{<<: [*{chr(n - 1)}, *{chr(n - 1)}]}}\n" for n in range(98, 123)
)


@pytest.mark.parametrize(
    ("engine", "text", "words"),
    [
        ("accelerate", LAUGHS, "more than 65536 values at line 5, with what aliases repeat"),
        ("accelerate", MERGED, "more than 65536 values at line"),
        ("accelerate", "a: &a [*a]\n", "*a at line 1 stands inside what it names"),
        ("accelerate", "[" * 10_000, "nested too deeply at line 1"),
        ("accelerate", "a: 1\nb: {c: 1, c: 2}\n", "the key 'c' at line 2 stands twice"),
        ("accelerate", "a: !!python/object:os.system x\n", "the tag tag:yaml.org,2002:python/object:os.system"),
        ("accelerate", "a: 2026-99-99\n", "not a YAML file: month must be in 1..12"),
        ("accelerate", f"num_processes: {'9' * 5000}\n", "not a YAML file: Exceeds the limit"),
        ("accelerate", "num_processes: 4294967296\n", "num_processes: the number is too large"),
        ("mindformers", "- " * 5000, "nested too deeply"),
        ("deepspeed", '{"a":' * 10_000, "nested too deeply"),
        ("deepspeed", '{"train_batch_size": "8"}', "train_batch_size: '8' is not a whole number"),
        ("deepspeed", '{"zero_optimization": {"reduce_bucket_size": 1e400}}', "NaN and infinity"),
        (
            "megatron",
            "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40,
            "become more than 262144 characters",
        ),
        ("megatron", "x " * 200_000, "400000 characters are too many; at most 262144"),
        ("megatron", "--pipeline-model-parallel-layout Et*99999999999L", "more than 4096 layers and stages"),
        ("megatron", f"--micro-batch-size {'9' * 400}", "--micro-batch-size: the number is too large"),
        ("megatron", "--clip-grad nan", "--clip-grad nan: not a number"),
        ("nemo", f"recipe{'.a' * 10_000} = 1", "nested too deeply"),
        ("torch", "LAYERS = (a,)", "line 1: (a,) is no plain value"),
        ("torch", "LAYERS = 'x'", "the constant LAYERS: 'x' is not a list"),
        ("torchtitan", f"a = {'[' * 10_000}", "nested too deeply"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(engine: str, text: str, words: str) -> None:
    with pytest.raises(ExportError) as caught:
        TARGETS[engine].read(text, FACTS)
    assert words in str(caught.value)


def test_aliases_and_merge_keys_within_the_limits_are_read() -> None:
    settings = settings_of("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n")
    assert (settings.integer("b.x", 0), settings.integer("b.y", 0)) == (1, 3)


def test_variables_of_a_script_become_what_they_are() -> None:
    options = options_in("A=2\nB=$A$A\np.py --x $B --y ${C:-7} --z ${D}")
    assert (options.integer("x"), options.integer("y"), options.words("z")) == (22, 7, ("${D}",))


def test_slurm_sets_what_a_script_asks_it_for() -> None:
    asked = "#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\n#SBATCH -c 12\n#SBATCH --job-name=9\n# SBATCH --ntasks=3\n"
    used = "p.py --x $SLURM_NNODES --y $((SLURM_NNODES * 2)) --z ${SLURM_NTASKS:-1} --w $SLURM_CPUS_PER_TASK --v $N"
    options = options_in(f"{asked}N=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))\n{used}")
    assert [options.integer(name) for name in "xyzwv"] == [4, 8, 1, 12, 32]


@pytest.mark.parametrize(
    "text",
    ["\n" * 100_000, " " * 100_000, "convert" * 15_000, "system:\n \n" * 12_000, "--" * 50_000, "fsdp:\n \n" * 15_000],
    ids=["lines", "blanks", "word", "sections", "dashes", "mappings"],
)
def test_whose_a_long_file_is_takes_no_longer_than_reading_it(text: str) -> None:
    """A mark that tries every place against every other takes minutes for these."""
    before = time.process_time()
    with refused(ExportError, "--from"):
        guessed_engine(text, TARGETS)
    assert time.process_time() - before < 5.0
