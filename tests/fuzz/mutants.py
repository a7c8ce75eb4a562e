"""Valid files made wrong, the same ones each time: values of other kinds, absurd numbers, nesting, broken bytes.

seed ─ load ─▶ tree ─ one to three changes ─▶ tree ─ dump ─▶ text ─ now and then a change of its bytes ─▶ mutant
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz.formats import PASTED, TWICE, Format

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 2**20, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1e-308, 1e308,
    "", " ", "x", "0", "8", "-1", "1e9", "NaN", "inf", "9" * 5000, "é漢🙂", "a b", "a/b", "../../etc/passwd",
    "a" * 9999, "a\x00b", "\u202e", "\ud800", "%s{0}", "$A${A:-", "*&!|>", [], [[]], [1], [0, -1], ["a"], [None],
    [1] * 500, {}, {"a": 1}, {"a": {"b": {}}}, *PASTED, "@deep", "@digits",
)  # fmt: skip

BYTES: tuple[bytes, ...] = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", "é".encode(), "\u2028".encode(), b"\r", b"\n\n", b'"', b"'", b"{", b"[",
    b"}", b"]", b",", b":", b"=", b"#", b"\\", b"$", b"&a ", b"*a ", b"<<: *a\n", b"!!python/object:os.system ", b"\t",
    b"9" * 5000, b"[" * 10_000, b"a." * 5000, b"(" * 5000, b"-" * 20_000,
)  # fmt: skip

WHOLE: tuple[bytes, ...] = (
    b"", b"\n", b"null", b"[]", b"{}", b"0", b'"text"', b"\x00" * 64, b"\xff" * 64, bytes(range(256)),
    b"[" * 100_000, b'{"a":' * 100_000, b"a: " * 5000, b"- " * 5000, b"a = " + b"[" * 100_000,
    b"a." * 20_000 + b"b = 1",
    b"[a" + b".a" * 20_000 + b"]", b"a = {b = " * 5000, b"\n".join(b"[[a]]" for _ in range(2000)),
    b"a: &a [1,1,1,1,1,1,1,1,1]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 114)),
    b"a: &a {x: 1}\n" + b"".join(b"%c: &%c {<<: [*%c, *%c]}\n" % (n, n, n - 1, n - 1) for n in range(98, 123)),
    b"a: &a [*a]\n", b"a: 2026-99-99\n", b"a: !!int ''\n", b"a: !!bool x\n", b"? [a]\n: b\n", b"a: 1\na: 2\n",
    b"A=xxxxxxxxxxxxxxxx\n" + b"A=$A$A\n" * 40 + b"p.py --micro-batch-size $A\n",
    b"A=" + b"x" * 60_000 + b"\n" + b"p.py --x " + b"$A " * 50_000,
    b"${A:-" * 40_000, b"--x " + b"y " * 200_000, b"--pipeline-model-parallel-layout Et*99999999999L\n",
    b"a = " + b"(" * 300, b"a = " + b"-" * 50_000 + b"1", b"a = " + b"1+" * 50_000 + b"1",
    b"a" + b".a" * 50_000 + b" = 1",
    b"recipe" + b".a" * 20_000 + b" = 1", b"LAYERS = (" + b"1," * 100_000 + b")",
    b"id,profile\n" + b'"' + b"x" * 200_000, b"," * 100_000, b"id,id\n1,2\n",
    (2**63).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{}",
)  # fmt: skip


def mutant(format: Format, seeds: Sequence[bytes], others: Sequence[bytes], name: str, number: int) -> bytes:
    """Mutant `number` of a reader, from its seeds; `others` are files of other readers."""
    rng = random.Random(f"{name} {number}")
    kind = rng.random()
    if kind < 0.06:
        return rng.choice(WHOLE)
    if kind < 0.08:
        return rng.choice(others)
    seed = rng.choice(seeds)
    if kind < 0.80:
        tree = copy.deepcopy(format.load(seed))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            tree = rng.choice(CHANGES)(rng, tree)
        content = format.dump(tree)
        return content if kind < 0.76 else _broken(rng, content)
    return _broken(rng, seed)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with every key or index in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        pairs = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        found += [(node, key) for key, _ in pairs]
        waiting += [child for _, child in pairs if isinstance(child, dict | list)]
    return found


def _placed(change: Callable[[random.Random, Any, Any], None]) -> Callable[[random.Random, Any], Any]:
    """A change at a place that is drawn, of a tree that has one."""

    def changed(rng: random.Random, tree: Any) -> Any:
        places = _places(tree) if isinstance(tree, dict | list) else []
        if not places:
            return rng.choice(VALUES)
        node, key = rng.choice(places)
        change(rng, node, key)
        return tree

    return changed


def _drop(rng: random.Random, node: Any, key: Any) -> None:
    del node[key]


def _replace(rng: random.Random, node: Any, key: Any) -> None:
    node[key] = rng.choice(VALUES)


def _number(rng: random.Random, node: Any, key: Any) -> None:
    """Other numbers where there is one, else as `_replace`."""
    value = node[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        _replace(rng, node, key)
        return
    node[key] = rng.choice(
        (str(value), [value], -value, value + 1, value - 1, value * 3, value * 10**6, float(value), value / 7, 0)
    )


def _wrap(rng: random.Random, node: Any, key: Any) -> None:
    node[key] = rng.choice(([node[key]], {"a": node[key]}, {key if isinstance(key, str) else "a": node[key]}))


def _twice(rng: random.Random, node: Any, key: Any) -> None:
    if isinstance(node, dict):
        node[f"{TWICE}{key}"] = node[key]
    else:
        node.insert(key, node[key])


def _strange_key(rng: random.Random, node: Any, key: Any) -> None:
    if isinstance(node, dict):
        node[rng.choice(("", "x", "é漢", "a.b", "a b", "a\x00", "\ud800", "<<", "a" * 9999))] = node[key]
    else:
        node += node[:50]


def _swap(rng: random.Random, node: Any, key: Any) -> None:
    other = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node[key], node[other] = node[other], node[key]


CHANGES = tuple(
    map(_placed, (_drop, _replace, _replace, _replace, _number, _number, _wrap, _twice, _strange_key, _swap))
)


def _broken(rng: random.Random, content: bytes) -> bytes:
    """A text that is cut, or has other bytes in it."""
    found, at = bytearray(content), rng.randrange(max(1, len(content)))
    kind = rng.randrange(6)
    if kind == 0:
        del found[at:]
    elif kind == 1:
        for _ in range(rng.choice((1, 1, 2, 8))):
            if found:
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del found[at : at + rng.choice((1, 1, 3, 20))]
    elif kind == 3:
        found[at:at] = found[at : at + rng.choice((1, 8, 60, 400))] * rng.choice((1, 2, 100))
    else:
        found[at:at] = rng.choice(BYTES)
    return bytes(found)
