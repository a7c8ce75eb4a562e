"""Recipes in Python, read without running them: the settings that a function of configurations would make.

    def pretrain_recipe(num_nodes=1):                                    trainer.num_nodes = 1
        recipe = run.Partial(fn, trainer=trainer(num_nodes=num_nodes))   trainer.strategy.tensor_model_parallel_size = 4
        recipe.trainer.strategy.tensor_model_parallel_size = 4
        return recipe

The reader walks the syntax tree and keeps a table of names. It follows numbers, words, lists, calls of functions in the
same file, and conditions on known values. Everything else is a *record*: the name of what would be called, and its
settings. Nothing is imported, and nothing that a file names is called. Steps and depth are limited, so reading always
ends.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hardware_profiles.foreign import ForeignTextError, parse_python
from planner.export.description import LARGEST, ExportError
from planner.export.files.recipe_setters import SETTERS

_STEPS = 20_000
_DEPTH = 12  # calls inside of calls
_VALUES = 5_000  # settings of one recipe
_NOTED = 4  # most statements that are noted one by one
_SUMS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other, ast.NotIn: lambda one, other: one not in other,
}  # fmt: skip


_COMPARABLE = (str, int, float, type(None))


@dataclass(slots=True, eq=False)
class Record:
    """What an unknown call would make: its name as it is written, and its settings."""

    made_by: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown value, as it is written: `torch.bfloat16`."""

    text: str


class _Returned(Exception):  # noqa: N818  # control flow, not an error
    """What a function returns."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings by path, and the names of everything that would be made, with the words given to it.

    `made_by` is the function that makes them, empty if the file assigns them. `notes` has statements that assign
    settings and were not followed, or under a condition that is not known.
    """

    settings: Mapping[str, Any]
    names: tuple[str, ...]
    made_by: str = ""
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> Mapping[str, str]:
        """Settings by path whose values are not known, as they are written."""
        return {path: value.text for path, value in self.settings.items() if isinstance(value, Unknown)}


def recipe_in(text: str, name: str = "", usual: str = "pretrain_recipe") -> Recipe:
    """The recipe that a file assigns, or that its function `name` makes.

    Without a name it is the `usual` function, or the only one. Raises ExportError if there is none, or if one has to be
    chosen.
    """
    try:
        tree = parse_python(text)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    reader = _Reader({node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)})
    made = reader.module(tree)
    if not name and made is not None:
        return replace(_flat(made), notes=reader.notes)
    chosen = _chosen(reader.functions, name, usual)
    found = reader.called(chosen, [], {})
    if not isinstance(found, Record):
        raise ExportError(f"{chosen}() makes no configuration that could be read; name another one with --recipe")
    return replace(_flat(found), made_by=chosen, notes=reader.notes)


def _chosen(functions: Mapping[str, ast.FunctionDef], name: str, usual: str) -> str:
    if name:
        if name not in functions:
            raise ExportError(f"--recipe {name:.80}: the file has no such function; it has {_few(functions)}")
        return name
    if usual in functions:
        return usual
    able = [one for one, node in functions.items() if not one.startswith("_") and not _needs(node)]
    if len(able) == 1:
        return able[0]
    if not able:
        raise ExportError(
            "no setting of a recipe is assigned, and no function makes one without arguments; give a file with"
            " recipe.trainer.strategy... = ..., or the table that the script reads"
        )
    raise ExportError(f"the file has {len(able)} recipes; say which with --recipe: {_few(able)}")


def _needs(node: ast.FunctionDef) -> bool:
    """Whether a function has arguments without a default."""
    return len(node.args.args) > len(node.args.defaults) or None in node.args.kw_defaults


def _few(names: "Mapping[str, object] | list[str]") -> str:
    return ", ".join(list(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "none"


def _flat(record: Record) -> Recipe:
    found: dict[str, Any] = {}
    names: list[str] = []
    waiting, seen = [("", record)], {id(record)}
    while waiting:
        place, one = waiting.pop()
        names.append(one.made_by)
        for key, value in one.settings.items():
            path = f"{place}{key}"
            if isinstance(value, Record):
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting.append((f"{path}.", value))
                found[path] = Unknown(value.made_by)
            else:
                found[path] = value
                if isinstance(value, str) and key in ("version", "name"):
                    names.append(value[:100])
            if len(found) > _VALUES:
                raise ExportError(f"the recipe has more than {_VALUES} settings")
    return Recipe(settings=found, names=tuple(names))


class _Reader:
    """Walks the statements of a file."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.constants: dict[str, Any] = {}
        self.texts: dict[int, str] = {}  # texts of nodes of the tree
        self.steps = 0
        self.depth = 0
        self.passed_over: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not followed."""
        some = list(self.passed_over)
        return tuple(some[:_NOTED]) + ((f"and {len(some) - _NOTED} more like this",) if len(some) > _NOTED else ())

    def pass_over(self, node: ast.stmt, what: str) -> None:
        """Note a statement that assigns settings, and that was not followed."""
        if any(isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) for one in ast.walk(node)):
            self.passed_over[f"line {node.lineno} of the recipe: {what}"] = None

    def text(self, node: ast.expr) -> str:
        """The beginning of an expression, as it is written."""
        if id(node) not in self.texts:
            self.texts[id(node)] = ast.unparse(node)[:200]
        return self.texts[id(node)]

    def module(self, tree: ast.Module) -> Record | None:
        """What the file itself makes: the last record to which settings are assigned."""
        made: list[Record] = []
        for node in _run_as_program(tree.body):
            if isinstance(node, ast.Expr):
                self.statement(node, self.constants)
                continue
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self.pass_over(node, "what it sets is not read; assign it outside of conditions and loops")
                continue
            self.statement(node, self.constants)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                root: ast.expr = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                value = self.constants.get(root.id) if isinstance(root, ast.Name) else None
                if isinstance(value, Record) and isinstance(target, ast.Attribute):
                    made.append(value)
        return made[-1] if made else None

    def called(self, name: str, given: list[Any], named: Mapping[str, Any]) -> Any:
        """What a function of the file returns."""
        node = self.functions[name]
        self.depth += 1
        if self.depth > _DEPTH:
            raise ExportError(f"{name}() calls others more than {_DEPTH} deep")
        names: dict[str, Any] = {}
        positional = [one.arg for one in node.args.args]
        defaults = [None] * (len(positional) - len(node.args.defaults)) + [*node.args.defaults]
        for parameter, default in (
            *zip(positional, defaults, strict=True),
            *zip((one.arg for one in node.args.kwonlyargs), node.args.kw_defaults, strict=True),
        ):
            names[parameter] = Unknown(parameter) if default is None else self.value(default, {})
        names.update(zip(positional, given, strict=False))
        names.update(named)
        try:
            self.statements(node.body, names)
        except _Returned as returned:
            return returned.value
        finally:
            self.depth -= 1
        return Unknown(f"{name}()")

    def statements(self, nodes: list[ast.stmt], names: dict[str, Any]) -> None:
        for node in nodes:
            self.statement(node, names)

    def statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise ExportError(f"the recipe takes more than {_STEPS} steps to read")
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value, names)
                for one in targets:
                    self.assign(one, found, names)
            case ast.AugAssign(target=target, op=sign, value=value):
                self.assign(target, self.sum(sign, self.value(target, names), self.value(value, names)), names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.value(value, names), names)
            case ast.If(test=test, body=body, orelse=orelse):
                condition = self.value(test, names)
                holds = _true(condition)
                if isinstance(condition, Unknown) or (isinstance(test, ast.Call) and isinstance(condition, Record)):
                    self.pass_over(node, f"{self.text(test)[:60]} is not known; read as {'true' if holds else 'false'}")
                self.statements(body if holds else orelse, names)
            case ast.Try(body=body, orelse=orelse, finalbody=finalbody):
                self.statements([*body, *orelse, *finalbody], names)
            case ast.For() | ast.While() | ast.Match():
                self.pass_over(node, "what it sets is not read; assign it outside of loops")
            case ast.Return(value=value):
                raise _Returned(None if value is None else self.value(value, names))
            case ast.With(body=body):
                self.statements(body, names)
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="setattr"), args=[place, ast.Constant(value=str(name)), value])
            ):
                self.record(place, names).settings[name] = self.value(value, names)
            case ast.Expr(value=ast.Call() as call):
                self.value(call, names)

    def assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.record(target.value, names).settings[target.attr] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list) and len(value) == len(target.elts)
            for at, one in enumerate(target.elts):
                self.assign(one, value[at] if known else Unknown(f"{self.text(target)} = ..."), names)

    def record(self, node: ast.expr, names: dict[str, Any]) -> Record:
        """The record to which an attribute is assigned; a new one if none is known."""
        if isinstance(node, ast.Name):
            found = names.get(node.id, self.constants.get(node.id))
            if not isinstance(found, Record):
                found = Record(node.id)
                names[node.id] = found
            return found
        if isinstance(node, ast.Attribute):
            before = self.record(node.value, names)
            found = before.settings.get(node.attr)
            if not isinstance(found, Record):
                found = before.settings[node.attr] = Record(node.attr)
            return found
        return Record(self.text(node)[:80])

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        self.steps += 1
        if self.steps > _STEPS:
            raise ExportError(f"the recipe takes more than {_STEPS} steps to read")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return names.get(name, self.constants.get(name, Unknown(name)))
            case ast.Attribute(value=inner, attr=attr):
                found = self.value(inner, names)
                known = isinstance(found, Record) and attr in found.settings
                return found.settings[attr] if known else Unknown(self.text(node))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.value(one, names) for one in elements]
            case ast.Call():
                return self.call(node, names)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                found = self.value(inner, names)
                return Unknown("not") if isinstance(found, Unknown) else not _true(found)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                found = self.value(inner, names)
                return -found if _plain(found) else Unknown("-")
            case ast.BinOp(left=left, op=sign, right=right):
                return self.sum(sign, self.value(left, names), self.value(right, names))
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                return self.compared(sign, self.value(left, names), self.value(right, names))
            case ast.BoolOp(op=sign, values=values):
                parts = [_true(self.value(one, names)) for one in values]
                return all(parts) if isinstance(sign, ast.And) else any(parts)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if _true(self.value(test, names)) else orelse, names)
        return Unknown(self.text(node))

    @staticmethod
    def sum(sign: ast.operator, one: Any, other: Any) -> Any:
        apply = _SUMS.get(type(sign))
        if apply is None or not (_plain(one) and _plain(other)):
            return Unknown("sum")
        try:
            found = apply(one, other)
        except ArithmeticError:
            return Unknown("sum")
        return found if abs(found) <= LARGEST else Unknown("sum")

    @staticmethod
    def compared(sign: ast.cmpop, one: Any, other: Any) -> Any:
        apply = _COMPARED.get(type(sign))
        listed = isinstance(sign, ast.In | ast.NotIn) and isinstance(other, list)
        others = other if listed else [other]  # lists of lists may have too many parts to compare
        if apply is None or not all(isinstance(part, _COMPARABLE) for part in (one, *others)):
            return Unknown("comparison")
        try:
            return bool(apply(one, other))
        except TypeError:
            return Unknown("comparison")

    def call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        given = [self.value(one, names) for one in node.args if not isinstance(one, ast.Starred)]
        named = {one.arg: self.value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            return self.called(node.func.id, given, named)
        name = self.text(node.func)
        if name in SETTERS and given and isinstance(given[0], Record):
            record, *others = given
            made = SETTERS[name](record.settings, others)
            return record if made is None else _set(record, *made)
        words = " ".join(str(one) for one in given if isinstance(one, str))
        if (
            name.rpartition(".")[2] in ("Config", "Partial")
            and node.args
            and not isinstance(node.args[0], ast.Constant)
        ):
            name = self.text(node.args[0])  # run.Config(Class, ...): a class and its settings
        return Record(f"{name} {words}".strip()[:400], named)


def _run_as_program(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a file, with those that run if it is the program."""
    for node in body:
        match node:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__")), body=inner):
                yield from inner
            case _:
                yield node


def _set(record: Record, path: tuple[str, ...], value: Any) -> Record:
    """The record, with a changed setting in it or in one of its parts."""
    inside = record
    for part in path[:-1]:
        found = inside.settings.get(part)
        if not isinstance(found, Record):
            found = inside.settings[part] = Record(part)
        inside = found
    inside.settings[path[-1]] = value
    return record


def _plain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _true(value: Any) -> bool:
    """Whether a condition holds; unknown ones do not."""
    return not isinstance(value, Unknown) and (isinstance(value, Record) or bool(value))


def plain_settings(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Settings with known values."""
    for path, value in recipe.settings.items():
        if not isinstance(value, Unknown | Record) and not (isinstance(value, list) and any(map(_strange, value))):
            yield path, value


def _strange(value: Any) -> bool:
    return isinstance(value, Unknown | Record | list)
