"""Layers: every module imports from its own layer or a lower one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[2]
ROOMS = ("kernels", "codec", "search", "store", "trainers", "")
"""Folders of the package from below; "" is the face. Search and store stand side by side."""
SIDE_BY_SIDE = {"search", "store"}
CODEC = ("state", "evidence", "format", "entropy", "groups", "lossless", "moments", "weights", "embeddings")
"""Folders of the codec, and the module `groups`, from the lowest up. Other modules are below or above all of them."""
GROUND = {
    "errors",
    "extras",
    "base",
    "parallel",
    "memory_limit",
}
"""Modules of the codec that its folders stand on; the others are above all folders."""

Module = tuple[str, ...]


def modules() -> dict[Module, Path]:
    """Return all modules of the package by their dotted names below it."""
    found = {}
    for folder in (*(room for room in ROOMS if room), "src/shrinkpoint"):
        for path in (HOME / folder).rglob("*.py"):
            if not any(p.is_symlink() for p in path.parents):
                below = path.relative_to(HOME / "src/shrinkpoint" if folder.startswith("src") else HOME)
                name = below.with_suffix("").parts
                found[name[:-1] if name[-1] == "__init__" else name] = path
    return found


def imports(name: Module, path: Path, known: dict[Module, Path], *, typed: bool = False) -> Iterator[Module]:
    """Yield the package's modules that a module imports; with `typed` also for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(below)
        for node in ast.walk(tree)
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for below in ast.walk(node)
    }
    package = name if path.name == "__init__.py" else name[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
            continue
        module = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            module = (*package[: len(package) - node.level + 1], *module)
        elif module[:1] == ("shrinkpoint",):
            module = module[1:]
        else:
            continue
        if module[:1] == ("searching",):  # the name under which the package `search` is linked
            module = ("search", *module[1:])
        for alias in node.names:
            yield (*module, alias.name) if (*module, alias.name) in known else module


def room_of(name: Module) -> str:
    return name[0] if name and name[0] in ROOMS else ""


def height(name: Module) -> int:
    """Return the height of a codec module: ground, folders in order, top level."""
    if name[1:2] and name[1] in CODEC:
        return 1 + CODEC.index(name[1])
    return 0 if name[1:2] and name[1] in GROUND else 1 + len(CODEC)


def test_arrows_between_rooms_point_down() -> None:
    known = modules()
    assert len(known) > 200
    seen = set()
    for name, path in known.items():
        for target in imports(name, path, known):
            here, there = room_of(name), room_of(target)
            seen.add((here, there))
            wrong = ROOMS.index(there) > ROOMS.index(here) or (here != there and {here, there} == SIDE_BY_SIDE)
            assert not wrong, f"{'.'.join(name)} imports {'.'.join(target)}"
    assert {("codec", "kernels"), ("store", "codec"), ("trainers", "store"), ("", "trainers")} <= seen


def test_arrows_inside_the_codec_point_down() -> None:
    known = {name: path for name, path in modules().items() if name[0:1] == ("codec",)}
    assert {name[1] for name in known if len(name) > 2} == set(CODEC) - {"groups"}
    assert {name[1] for name in known if len(name) == 2} >= GROUND
    for name, path in known.items():
        for target in imports(name, path, known):
            if target in known and target != ("codec",):
                assert height(target) <= height(name), f"{'.'.join(name)} imports {'.'.join(target)}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    open_ends = {
        name: {t for t in imports(name, path, known, typed=True) if t in known and t != name}
        for name, path in known.items()
    }
    # The protocols of a kernel's subject are compared with its back ends as types; it imports none of them.
    for name, path in known.items():
        back_ends = {(*name, end) for end in ("reference", "cpu", "gpu")}
        open_ends[name] -= back_ends - set(imports(name, path, known))
    while free := {name for name, targets in open_ends.items() if not targets & open_ends.keys()}:
        for name in free:
            del open_ends[name]
    assert not open_ends, sorted(".".join(name) for name in open_ends)
