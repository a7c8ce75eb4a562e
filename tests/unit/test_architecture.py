"""The architecture, held by reading every import of the libraries.

A module belongs to the package of `LAYERS` with the longest name that its own name starts with. A package may import
from itself and from the layers below its own; packages of one layer do not import each other. So search, reports,
exporters and the runtime have nothing in common but the plan.

Imports count wherever they stand: inside functions, under TYPE_CHECKING, or as `import_module("a.literal")`.
"""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("costmodels", "hardware_profiles", "planner", "runtime")

LAYERS = (
    ("planner.cli",),
    ("planner.ui",),  # the page, on top of the functions
    ("planner",),  # planner/__init__.py, the public face
    ("planner.api",),  # the functions behind it, which commands share
    ("planner.validation",),  # asks the search, and compares with what was measured
    ("planner.strategy_search", "planner.report", "planner.export", "runtime"),
    ("planner.engines",),
    ("planner.plan",),
    ("planner.pricing",),
    ("planner.sharding",),
    ("planner.graph", "planner.models"),
    ("planner.limits",),
    ("planner.faults",),
    ("planner.errors", "planner.fp8_recipes", "planner.matching", "planner.nearest", "planner.old_words"),
    ("costmodels",),
    ("hardware_profiles",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}

# Subpackages of the larger packages, lowest first: a module imports from its own subpackage and from those before it.
# Modules of the package itself are for all subpackages (settings, folders, signals), or use all of them.
SUBPACKAGES = {
    "runtime": (
        "launchers", "run_folder", "comm", "optimizers", "servers", "tables", "offload", "ops", "parameters",
        "executor", "update", "processes", "step", "data", "checkpoint", "reference", "recovery", "profiling",
        "auditing", "proving", "launch", "integrations",
    ),
    "planner.export": ("files", "megatron", "mindspore", "pytorch"),
    "planner.plan": ("binding", "layout", "prediction", "compare", "shrinking"),
    "planner.strategy_search": (
        "request", "solvers", "tables", "decomposition", "engine", "finalists", "exploration", "fixed", "refinement",
        "analysis",
    ),
    "planner.validation": ("reading", "frameworks", "stack", "request", "results", "pricing"),
}  # fmt: skip

# Beside the layers: a run that goes on with other devices has a plan searched for them.
# A notebook shows plans, results and comparisons as small pages (`_repr_html_`).
ALLOWED = (
    ("runtime.recovery.replanning", "planner.strategy_search"),
    ("planner.plan.plan", "planner.report"),
    ("planner.plan.compare.differences", "planner.report"),
    ("planner.strategy_search.result", "planner.report"),
)

# Who may import each package that is not of the standard library: these modules, and modules below them.
MAY_IMPORT = {
    "accelerate": ("runtime.integrations.huggingface",),
    "causal_conv1d": ("planner.graph.operators.state_kernels",),
    "cryptography": ("runtime.servers.certificate",),
    "fla": ("planner.graph.operators.state_kernels",),
    "jinja2": ("planner.report.html",),
    "lightning": ("runtime.integrations.lightning",),
    "mamba_ssm": ("planner.graph.operators.state_kernels",),
    "networkx": ("planner.graph.operator_graph", "planner.strategy_search.solvers"),
    "numpy": (
        "costmodels",
        "hardware_profiles.units",
        "planner.graph.blocks",
        "planner.pricing",
        "planner.strategy_search",
        "planner.sharding.redistribute",
        "planner.plan.layout.parameter_owners",  # loads of all devices of a mesh at once
        "runtime.data.loading",  # datasets draw from numpy's generator
        "runtime.servers",  # hold rows without torch, so that they start in a fraction of a second
        "runtime.data.tokens",  # maps files
    ),
    "ortools": ("planner.strategy_search.solvers",),
    "plotly": ("planner.report.html",),
    "pydantic": (
        "hardware_profiles",
        "planner.cli.schemas",  # the form of answers
        "planner.export.pytorch.torch_script",
        "planner.models.huggingface.config",
        "planner.plan",
        "planner.sharding.discover",
        "runtime.processes.breakdown",  # notes of ranks
        "runtime.checkpoint",
        "runtime.comm.exchange",
        "runtime.processes.hang",
        "runtime.launchers.rank_table",
        "runtime.processes.progress",
        "runtime.run_settings",
        "runtime.recovery.state_replicas",
        "runtime.run_folder",
    ),
    "rich": ("planner.cli", "planner.report"),
    "safetensors": ("runtime.checkpoint", "runtime.recovery.state_replicas"),
    "tomlkit": ("hardware_profiles.write", "planner.export.files.toml"),
    "torch": ("planner.graph", "planner.models", "planner.sharding.discover", "runtime"),
    "torch.distributed": ("runtime",),
    "triton": ("runtime.ops.triton_kernels",),
    "transformers": ("planner.models.huggingface", "runtime.integrations.huggingface"),
    "typer": ("planner.cli",),
    "xxhash": ("runtime.checkpoint",),
    "yaml": ("planner.export.files.yaml_files",),
}

# Packages that come with PyTorch where it is built for accelerators, and kernels that people may have beside it.
BROUGHT = {"triton", "causal_conv1d", "fla", "mamba_ssm"}

# Packages whose distribution goes by another name.
IMPORTED = {"pyyaml": "yaml"}

# Text of others is parsed where limits are kept, and nowhere else: what others may call of these modules, and the
# modules that may call the rest.
PARSERS: dict[str, tuple[str, ...]] = {
    "ast": ("unparse", "walk"),
    "csv": ("writer",),
    "json": ("dump", "dumps"),
    "pickle": (),
    "tomlkit": ("array", "comment", "document", "dumps", "inline_table", "items.InlineTable", "nl"),
    "tomllib": (),
    "yaml": (),
}
MAY_PARSE = {
    "hardware_profiles.foreign": ("ast", "csv", "json", "tomllib"),
    "planner.graph.tracing.value_checks": ("ast",),  # code of the model, which is running
    "hardware_profiles.intervals": ("csv",),  # a packaged table
    "hardware_profiles.memory_intervals": ("csv",),  # the same
    "planner.export.files.toml": ("tomlkit",),  # a text that was read before, to change it with its comments
    "planner.export.files.yaml_files": ("yaml",),
    "runtime.servers.frames": ("json",),  # limits of their own, without pydantic
}
VALIDATING_TEXT = ("model_validate_json", "validate_json")
MAY_VALIDATE_TEXT = (
    "planner.cli.schemas",  # what is about to be written
    "planner.plan.carried",  # text that was parsed within limits, for strictness as in JSON
    "planner.plan.schema",  # the same
    "planner.sharding.discover",
    "runtime.checkpoint.manifest",  # the same
    "runtime.comm.exchange",  # lengths are checked before
    "runtime.recovery.state_replicas",  # of limited size, in a folder of our own
    "runtime.run_folder",  # the same
)

# A solver sees the problem, never the graph it came from.
SOLVERS = "planner.strategy_search.solvers"
SOLVERS_MAY_IMPORT = (
    SOLVERS,
    "planner.strategy_search.solvers.problem",
    "planner.errors",
    "planner.limits",
    "hardware_profiles.units",
    "networkx",
    "numpy",
    "ortools",
)

SLOW_TO_LOAD = ("jinja2", "networkx", "ortools", "plotly", "rich", "torch", "transformers")

# What makes objects of bytes runs code that the bytes name. Files of tensors are read by safetensors, ranks tell each
# other JSON (`runtime.comm.exchange`). Only the workers of `planner.validation` get their tasks, through pipes, as
# pickles.
UNPICKLERS = ("cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve", "torch.distributed.rpc",
              "multiprocessing.connection", "multiprocessing.managers")  # fmt: skip
UNPICKLING_CALLS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
                    "send_object_list", "recv_object_list")  # fmt: skip
SUSPECT = re.compile("|".join((*UNPICKLERS, *UNPICKLING_CALLS, "multiprocessing", "torch.load", "rpc", "pickle")))
"""Words of which one is in whatever unpickles: only such modules are looked at."""

MAY_PRINT = ("planner.cli", "planner.report", "runtime.launch.launch", "runtime.proving.rank")

# Launchers speak through environment variables, and so do we with the processes that we start. Nothing else reads them.
MAY_READ_ENVIRONMENT = (
    "planner.cli.commands.run",  # whether a launcher has started this process
    "planner.cli.graph_folder",  # PLAN_GRAPH_CACHE and XDG_CACHE_HOME
    "planner.cli.printing",  # COLUMNS
    "runtime.comm.device_mesh",  # the launcher's rank and address
    "runtime.comm.groups",  # the same, before there is a mesh
    "runtime.comm.rendezvous",  # attempts of torchrun
    "runtime.launch.launch",  # the launcher's rank, and OMP_NUM_THREADS of this process
    "runtime.processes.hang",  # RANK
    "runtime.processes.rank",  # RANK and WORLD_SIZE, set by `runtime.processes.ranks`
    "runtime.processes.ranks",  # what ranks inherit
    "runtime.recovery.replica_folder",  # PLAN_STATE_REPLICAS
    "runtime.servers.fleet",  # what servers inherit
)
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")

# The names of a module that its functions change.
STATE = {
    "planner.api.callers": {"_COMMAND"},  # a ContextVar: whether a command calls, whose errors name its options
    "planner.cli.limiting": {"_BEGAN"},  # a ContextVar: when the process began, where a command is all that it does
    "planner.graph.tracing.own_functions": {"_FUNCTIONS"},  # what operators of PyTorch's own registry stand for
    "planner.limits": {"_CURRENT"},  # a ContextVar: the limits of the call that runs
    "runtime.comm.groups": {"_LAST"},  # the step of which `get_rank` and its like speak, as long as it lives
    "runtime.step.training_step": {"_alive"},  # steps whose process groups are left before the interpreter ends
    "runtime.waiting": {"_ASKED"},  # a ContextVar: who measures waiting
}
CHANGING = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
            "remove", "set", "setdefault", "update"}  # fmt: skip


# Who runs what a text says: by importing a name that is no literal, or by executing text. Nothing else may.
RUNS = {
    "planner": ("import_module",),  # its own modules, by a literal table
    "planner.models.imported": ("import_module",),  # what a person names: --model, --data
    "runtime": ("import_module",),  # its own modules
    "runtime.executor.lowering.compiled": ("exec",),  # programs that are written from a traced graph
    "runtime.executor.lowering.programs": ("exec",),
    "runtime.integrations": ("import_module",),  # the same
    "runtime.servers": ("import_module",),  # its own modules
}
RUNNERS = ("__import__", "eval", "exec", "import_module", "run_module", "run_path", "spec_from_file_location")
UNPICKLES = ("Unpickler", "pickle", "torch.load", "marshal", "shelve", "dill", "cloudpickle")

# Who imports, calls or opens what a reference names. All get it from the person; of a plan file
# `planner.plan.binding.model_of` passes on what is of the zoo, and nothing else.
GIVEN = {
    "imported_factory": ("planner.models.zoo", "runtime.data.datasets"),
    "from_config": ("planner.models.zoo",),
    "build_model": (
        "planner.api.plans",
        "planner.api.importing",
        "planner.api.importing_operators",
        "planner.models.naming.of_model",
        "planner.models.zoo",
        "planner.plan.binding.model_of",
        "planner.plan.shrinking.shrink",  # a smaller one of what `buildable` allows
        "planner.strategy_search.job",
    ),
    "traced_named": ("planner.cli.commands.explain", "planner.strategy_search.job"),  # of the zoo, or built by a person
    "naming_of": ("runtime.checkpoint.naming",),  # of `buildable`
    "build_planned": (
        "planner.api.planned",
        "planner.cli.commands.show",
        "runtime.launch.training",
        "runtime.proving.comparing",
        "runtime.recovery.replanning",
    ),
}


def below(module: str, *roots: str) -> bool:
    """Whether `module` is one of `roots` or inside one."""
    return any(module == root or module.startswith(root + ".") for root in roots)


def package_of(module: str) -> str | None:
    """The package of `LAYERS` that a module of ours belongs to; None if no layer names it."""
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == "planner" else parts[0]
    return name if name in LAYER_OF else None


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of the libraries by its dotted name; a package goes by its own."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def syntax(module: str) -> ast.Module:
    path = sources()[module]
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Everything in a module, which many tests look through."""
    return tuple(walked(tree))


def walked(top: ast.AST) -> list[ast.AST]:
    """What `ast.walk` finds, in half the time, without `ctx`, which is looked at where it stands."""
    found = [top]
    for node in found:
        for name in node._fields:
            child = getattr(node, name, None) if name != "ctx" else None
            if isinstance(child, list):
                found += [one for one in child if isinstance(one, ast.AST)]
            elif isinstance(child, ast.AST):
                found.append(child)
    return found


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported; a relative name starts with a dot.

    `from a import b` gives `a.b`, which may be a module or a name in `a`. Both lie in one package, except right under
    `planner`, which `normalised` settles. Using `torch.distributed` through a plain `import torch` counts too.
    """
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                prefix = "." * level + (base + "." if base else "")
                yield from ((node.lineno, prefix + name.name) for name in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                yield node.lineno, "torch.distributed"


def normalised(name: str) -> str:
    """`planner.Plan`, a name of the public face, becomes `planner`; modules and packages stay what they are."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] == "planner" and name not in LAYER_OF and name not in sources():
        return "planner"
    return name


def complaint(module: str, imported: str) -> str | None:
    """What is wrong with `module` importing `imported`; None when nothing is."""
    if imported.startswith("."):
        return "relative import"
    imported = normalised(imported)
    top = imported.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if below(module, SOLVERS) and not below(imported, *SOLVERS_MAY_IMPORT):
        return "solvers see the problem and nothing else of the project"
    if top in PACKAGES:
        ours, theirs = package_of(module), package_of(imported)
        if ours is None or theirs is None:
            return "no layer names this package"
        if ours == theirs or LAYER_OF[ours] < LAYER_OF[theirs] or (module, theirs) in ALLOWED:
            return None
        return f"{ours} is not above {theirs}"
    if top not in MAY_IMPORT:
        return f"{top} is no dependency in MAY_IMPORT"
    for package in (package for package in MAY_IMPORT if below(imported, package)):
        if not below(module, *MAY_IMPORT[package]):
            return f"only {', '.join(MAY_IMPORT[package])} may import {package}"
    return None


def test_every_folder_of_the_planner_has_a_layer() -> None:
    strangers = sorted(module for module in sources() if package_of(module) is None)
    assert strangers == [], "name each in LAYERS, or move it into a package there"


@pytest.mark.slow
def test_imports_point_downwards_and_third_parties_are_imported_where_they_may_be() -> None:
    complaints = [
        f"{sources()[module].relative_to(ROOT)}:{line}: imports {imported}: {problem}"
        for module in sources()
        for line, imported in imports_of(module)
        if (problem := complaint(module, imported))
    ]
    assert complaints == [], "\n".join(complaints)


def subpackage_of(module: str) -> tuple[str, int] | None:
    """The package and the number of the subpackage that a module is in; None outside of subpackages."""
    for package, names in SUBPACKAGES.items():
        if below(module, package):
            name = module.removeprefix(package).removeprefix(".").partition(".")[0]
            return (package, names.index(name)) if name in names else None
    return None


def test_subpackages_are_those_that_exist() -> None:
    for package, names in SUBPACKAGES.items():
        folder = ROOT / package.replace(".", "/")
        assert sorted(names) == sorted(path.parent.name for path in folder.glob("*/__init__.py"))


@pytest.mark.slow
def test_subpackages_import_from_those_before_them() -> None:
    complaints = []
    for module in sources():
        here = subpackage_of(module)
        for line, imported in imports_of(module):
            there = subpackage_of(imported)
            if here is not None and there is not None and here[0] == there[0] and there[1] > here[1]:
                complaints.append(f"{sources()[module].relative_to(ROOT)}:{line}: imports {imported}, which is above")
    assert complaints == [], "\n".join(complaints)


def called(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The last word of everything that is called, and the call."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


@functools.cache
def imports_of(module: str) -> tuple[tuple[int, str], ...]:
    return tuple(imports(syntax(module)))


@functools.cache
def calls_of(module: str) -> tuple[tuple[str, ast.Call], ...]:
    return tuple(called(syntax(module)))


def runs(calls: Iterable[tuple[str, ast.Call]]) -> list[str]:
    """Calls that run what a text says. A method called `eval` takes no text."""
    return [
        name
        for name, call in calls
        if name in RUNNERS and call.args and not (name == "import_module" and isinstance(call.args[0], ast.Constant))
    ]


@pytest.mark.slow
def test_text_is_run_in_few_places_and_nothing_is_unpickled() -> None:
    assert {module: tuple(found) for module in sources() if (found := runs(calls_of(module)))} == RUNS
    unpickling = [
        f"{module}: {name}"
        for module in sources()
        for name in UNPICKLES
        if any(below(imported, name) for _, imported in imports_of(module))
        or any(last in name and ast.unparse(call.func).endswith(name) for last, call in calls_of(module) if "." in name)
    ]
    assert unpickling == []


def test_what_a_reference_names_is_built_where_a_person_gave_it() -> None:
    for function, callers in GIVEN.items():
        found = [module for module in sources() if any(name == function for name, _ in calls_of(module))]
        assert tuple(found) == tuple(sorted(callers)), function


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(plan.model.reference)",
        "from importlib import import_module as load, import_module\nimport_module(name)",
        "__import__(name)",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
    ],
)
def test_running_a_text_is_seen(text: str) -> None:
    assert runs(called(ast.parse(text)))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("costmodels.link", "planner.errors"),
        ("costmodels.link", "torch"),
        ("hardware_profiles.load", "costmodels.units"),
        ("planner.errors", "planner.graph"),
        ("planner.export.megatron.megatron", "planner.strategy_search.solvers.problem"),
        ("planner.graph.trace", "torch.distributed"),
        ("planner.models.llama", "planner.graph.trace"),
        ("planner.plan.compare.verify", "planner.strategy_search.request.space"),
        ("planner.plan.compare.verify", "planner.Plan"),
        ("planner.report.html", "planner.strategy_search.solvers.problem"),
        ("planner.report.html", "runtime.audit"),
        ("planner.strategy_search.tables.cost_table", "ortools.math_opt"),
        ("planner.strategy_search.solvers.problem", "rich.table"),
        ("planner.strategy_search.solvers.ilp", "planner.graph.operator_graph"),
        ("planner.strategy_search.solvers.ilp", "pydantic"),
        ("planner.sharding.layout", ".mesh"),
        ("planner.sharding.layout", "planner.novelties.layout"),
        ("planner.sharding.layout", "scipy.optimize"),
        ("runtime.executor.executor", "planner.cli.main"),
        ("runtime.executor.executor", "planner.export.pytorch.torchtitan"),
        ("runtime.executor.executor", "planner.report.terminal"),
        ("runtime.executor.executor", "planner.strategy_search.solvers.problem"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, imported: str) -> None:
    assert complaint(module, imported) is not None


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("costmodels.fit", "numpy.linalg"),
        ("planner", "planner.strategy_search.Search"),
        ("planner.cli.main", "runtime.launch.launch"),
        ("planner.pricing.operator", "costmodels.collectives"),
        ("planner.report.html", "planner.plan.Plan"),
        ("planner.strategy_search.solvers.ilp", "ortools.math_opt.python"),
        ("planner.strategy_search.solvers.ilp", "planner.strategy_search.solvers.problem.Problem"),
        ("planner.sharding.layout", "dataclasses.dataclass"),
        ("runtime.executor.executor", "planner.sharding.layout.Layout"),
        ("runtime.executor.executor", "torch.distributed.tensor"),
    ],
)
def test_a_right_import_passes(module: str, imported: str) -> None:
    assert complaint(module, imported) is None


def test_every_form_of_import_is_read() -> None:
    tree = ast.parse(
        "import numpy as np, rich.table\n"
        "from planner.plan import Plan\n"
        "from . import sibling\n"
        "from .sibling import name\n"
        "def late():\n"
        "    import_module('ortools')\n"
        "    importlib.import_module('typer')\n"
        "    return torch.distributed.get_rank()\n"
    )
    assert sorted(imports(tree)) == [
        (1, "numpy"),
        (1, "rich.table"),
        (2, "planner.plan.Plan"),
        (3, ".sibling"),
        (4, ".sibling.name"),
        (6, "ortools"),
        (7, "typer"),
        (8, "torch.distributed"),
    ]


def test_every_dependency_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    without = ("dev", "docs", "engines", "engines-later")
    optional = [wanted for extra, wanted in project["optional-dependencies"].items() if extra not in without]
    requirements = [*project["dependencies"], *(one for wanted in optional for one in wanted)]
    names = (requirement.partition(">")[0].strip() for requirement in requirements)
    declared = {IMPORTED.get(name, name) for name in names}
    assert declared == {package for package in MAY_IMPORT if "." not in package} - BROUGHT


@pytest.mark.skipif("planner" not in sources(), reason="planner/__init__.py is not written yet")
def test_importing_the_planner_is_instant() -> None:
    code = f"import sys, planner; print(*(name for name in {SLOW_TO_LOAD} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def public_names(tree: ast.Module) -> list[str] | None:
    """The `__all__` of a module; None when it has none."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
            ):
                return list(ast.literal_eval(value))
    return None


def test_public_names_are_listed_in_sorted_order() -> None:
    complaints = []
    for module, path in sources().items():
        tree = syntax(module)
        names = public_names(tree)
        only_a_docstring = all(isinstance(node, ast.Expr) for node in tree.body)
        if names is None and path.name == "__init__.py" and not only_a_docstring:
            complaints.append(f"{path.relative_to(ROOT)}: no __all__")
        if names is not None and names != sorted(set(names)):
            complaints.append(f"{path.relative_to(ROOT)}: __all__ should read {sorted(set(names))}")
    assert complaints == [], "\n".join(complaints)


def test_libraries_do_not_print() -> None:
    prints = [
        f"{sources()[module].relative_to(ROOT)}:{node.lineno}"
        for module in sources()
        if not below(module, *MAY_PRINT)
        for node in nodes(syntax(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def reads_environment(tree: ast.Module) -> bool:
    named = (node.attr for node in nodes(tree) if isinstance(node, ast.Attribute))
    return any(name in ENVIRONMENT for name in (*named, *(name.removeprefix("os.") for _, name in imports(tree))))


def test_environment_variables_are_read_where_processes_start() -> None:
    readers = {
        module
        for module, path in sources().items()
        if any(name in path.read_text(encoding="utf-8") for name in ENVIRONMENT) and reads_environment(syntax(module))
    }
    assert readers == set(MAY_READ_ENVIRONMENT)


def module_state(tree: ast.Module) -> set[str]:
    """Names of a module that a function of it binds anew, or changes in place."""
    targets = [
        target
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name for function in functions for name in _changed(function, names)}


def _changed(function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> Iterator[str]:
    nodes = walked(function)
    bound = {one.arg for one in nodes if isinstance(one, ast.arg)}
    bound |= {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    for node in nodes:
        match node:
            case ast.Global(names=found):
                yield from found
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in CHANGING:
                yield from {name} & names - bound
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield from {name} & names - bound
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield from {name} & names - bound


@pytest.mark.slow
def test_modules_keep_no_state() -> None:
    found = {module: names for module in sources() if (names := module_state(syntax(module)))}
    assert found == STATE


@pytest.mark.parametrize(
    "text", ["global known", "known.append(1)", "known[0] = 1", "del known[0]", "known.name = 1", "known[0] += 1"]
)
def test_state_of_a_module_is_seen(text: str) -> None:
    assert module_state(ast.parse(f"known = []\ndef change():\n    {text}\n")) == {"known"}
    assert not module_state(ast.parse("known = []\ndef change():\n    known = []\n    known.append(1)\n"))


def unpickling(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that unpickles, or can be told to."""
    yield from ((line, name) for line, name in imports(tree) if below(name, *UNPICKLERS))
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in UNPICKLING_CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords) if not any(
                one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in keywords
            ):
                yield node.lineno, "torch.load without weights_only=True"
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield value.lineno, "allow_pickle"


def test_nothing_is_unpickled() -> None:
    found = [
        f"{sources()[module].relative_to(ROOT)}:{line}: {name}"
        for module, path in sources().items()
        if SUSPECT.search(path.read_text(encoding="utf-8"))
        for line, name in unpickling(syntax(module))
    ]
    assert found == [], "\n".join(found)


def test_every_form_of_unpickling_is_seen() -> None:
    tree = ast.parse(
        "import pickle\n"
        "from multiprocessing.connection import Listener\n"
        "dist.all_gather_object(found, own)\n"
        "from torch.distributed import broadcast_object_list as tell; broadcast_object_list(x)\n"
        "torch.load(path)\n"
        "torch.load(path, weights_only=False)\n"
        "torch.load(path, weights_only=True)\n"
        "numpy.load(path, allow_pickle=True)\n"
        "numpy.load(path, allow_pickle=False)\n"
    )
    assert sorted({line for line, _ in unpickling(tree)}) == [1, 2, 3, 4, 5, 6, 8]


def raw_parsing(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls of a module that parse text without limits, and imports of what would."""
    called = [
        (node.lineno, f"{of.id if isinstance(of, ast.Name) else ''}.{name}")
        for node in nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        for of, name in [(node.func.value, node.func.attr)]
    ]
    for line, call in (*called, *imports(tree)):
        package, _, name = call.partition(".")
        if package in PARSERS and name and name not in PARSERS[package] and package not in MAY_PARSE.get(module, ()):
            yield line, call
        if name in VALIDATING_TEXT and not below(module, *MAY_VALIDATE_TEXT):
            yield line, call


@pytest.mark.slow
def test_text_of_others_is_parsed_within_limits() -> None:
    calls = [
        f"{sources()[module].relative_to(ROOT)}:{line}: {call}; read it with hardware_profiles.foreign"
        for module in sources()
        for line, call in raw_parsing(module, syntax(module))
    ]
    assert calls == [], "\n".join(calls)


@pytest.mark.parametrize(
    "text", ["json.loads(text)", "json.load(file)", "tomllib.load(file)", "yaml.safe_load(text)", "csv.reader(file)",
             "csv.DictReader(file)", "ast.literal_eval(text)", "adapter.validate_json(text)",
             "TypeAdapter(int).validate_json(text)", "from json import loads"],
)  # fmt: skip
def test_a_parser_without_limits_is_seen(text: str) -> None:
    assert list(raw_parsing("runtime.launch.launch", ast.parse(text)))
    assert not list(raw_parsing("runtime.launch.launch", ast.parse("import json\njson.dumps(value)")))


def test_who_may_have_been_meant_is_asked_in_one_place() -> None:
    """`planner.errors.did_you_mean`; what stands below the planner has a place of its own."""
    asking = {name for name, path in sources().items() if "did you mean" in path.read_text(encoding="utf-8")}
    assert asking == {"planner.errors", "hardware_profiles.errors", "hardware_profiles.compose"}
