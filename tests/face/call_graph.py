"""Follow `state` through `compress` by the static call graph.

`python -m tests.face.call_graph [--steps]` prints the counts.

Counted are the files of `codec/` that a reader of the source enters, and how often the way leads back to a file left
before: as far as a codec, and with all that the codec of weights may do, other codecs that it falls back to included.
Calls are followed in the order of the source, each function once, where an argument or the object of a method comes
from `state`. A kernel is a step that is not followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HOME = Path(__file__).parents[2]
ROOT = "codec"
START = "codec/compress.py", "compress", "state"
WEIGHTS = {"Codec": "Quantize", "GroupCodec": "Quantize", "Reference": "LevelsReference"}
"""What an array of weights meets behind an interface."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Page:
    """A module: its functions and classes, and where the names come from that it imports."""

    path: str
    defined: dict[str, Function | ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """A function or a class, the module that defines it, and the class of a method."""

    page: Page
    node: Function | ast.ClassDef
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        return f"{self.page.path}:{self.owner.name + '.' if self.owner else ''}{self.node.name}"


class Source:
    """The modules below a folder, and their names; `behind` says what interfaces stand for."""

    def __init__(self, home: Path, behind: dict[str, str]) -> None:
        self.home, self.implementations = home, behind
        self.pages = {path.relative_to(home).as_posix(): Page("") for path in (home / ROOT).rglob("*.py")}
        for path in self.pages:
            self.pages[path] = self._page(path)

    def _page(self, path: str) -> Page:
        page = Page(path)
        for node in ast.walk(ast.parse((self.home / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.split("/")[: -node.level]
                parts = [*folder, *(node.module or "").split(".")] if node.module else folder
                for name in node.names:
                    page.imported[name.asname or name.name] = "/".join(parts), name.name
        for node in ast.parse((self.home / path).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                page.defined[node.name] = node
        return page

    def find(self, page: Page, name: str) -> Definition | Page | None:
        """Return what a name means on a page, followed through imports."""
        if name in page.defined:
            return Definition(page, page.defined[name])
        if name not in page.imported:
            return None
        folder, what = page.imported[name]
        for path in (f"{folder}/{what}.py", f"{folder}/{what}/__init__.py"):
            if path in self.pages:
                return self.pages[path]
        of = next((self.pages[p] for p in (f"{folder}.py", f"{folder}/__init__.py") if p in self.pages), None)
        return None if of is None else self.find(of, what)

    def kind(self, page: Page, annotation: ast.expr | None) -> Definition | None:
        """Return the first class that an annotation names; of a container, that of its elements."""
        for node in [] if annotation is None else ast.walk(annotation):
            name = node.value if isinstance(node, ast.Constant) else node.id if isinstance(node, ast.Name) else None
            found = self.find(page, name) if isinstance(name, str) else None
            if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
                return self.behind(found)
        return None

    def behind(self, kind: Definition) -> Definition:
        """Return the class that implements an interface."""
        wanted = self.implementations.get(kind.node.name)
        found = (Definition(page, page.defined[wanted]) for page in self.pages.values() if wanted in page.defined)
        return kind if wanted is None else next(found)

    def member(self, kind: Definition, name: str) -> Definition | ast.expr | None:
        """Return a method, or the annotation of a field, of a class or of one that it inherits from."""
        assert isinstance(kind.node, ast.ClassDef)
        for node in kind.node.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return Definition(kind.page, node, kind.node)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return node.annotation
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                argument = next((a.annotation for a in node.args.args if a.arg == name), None)
                if argument is not None:  # kept under its name
                    return argument
        bases = (self.find(kind.page, base.id) for base in kind.node.bases if isinstance(base, ast.Name))
        found = (self.member(base, name) for base in bases if isinstance(base, Definition))
        return next((member for member in found if member is not None), None)


class Walk:
    """One way through the source; `steps` are the functions in the order in which they are read."""

    def __init__(self, behind: dict[str, str], home: Path = HOME) -> None:
        self.source = Source(home, behind)
        self.steps: list[str] = []
        self.read: set[str] = set()
        path, name, argument = START
        page = self.source.pages[path]
        self.enter(Definition(page, page.defined[name]), {argument})

    @property
    def files(self) -> list[str]:
        """Files in the order in which they are entered and left."""
        paths = [step.split(":")[0] for step in self.steps]
        return [path for i, path in enumerate(paths) if not i or paths[i - 1] != path]

    def counts(self) -> tuple[int, int]:
        """Return the files entered, and the returns to a file left before."""
        return len(set(self.files)), len(self.files) - len(set(self.files))

    def enter(self, found: Definition, tainted: set[str]) -> None:
        """Read a function whose parameters of these names come from `state`."""
        if found.name in self.read:
            return
        self.read.add(found.name)
        self.steps.append(found.name)
        _Body(self, found, set(tainted)).follow()


class _Body:
    """The body of a function: what comes from `state` in it, and the classes of its names."""

    def __init__(self, walk: Walk, found: Definition, tainted: set[str]) -> None:
        self.walk, self.found, self.tainted = walk, found, tainted
        self.page, self.source = found.page, walk.source
        self.kinds: dict[str, Definition] = {}
        for node in ast.walk(found.node):
            if isinstance(node, ast.arg) and (kind := self.source.kind(self.page, node.annotation)):
                self.kinds[node.arg] = kind
            if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not found.node:
                self.tainted |= {arg.arg for arg in node.args.args}
        if found.owner is not None:
            self.kinds |= dict.fromkeys(("self", "cls"), Definition(found.page, found.owner))

    def follow(self) -> None:
        for statement in self.found.node.body:
            self.visit(statement)

    def visit(self, node: ast.AST) -> None:
        """Visit a node after its children, in the order of evaluation."""
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if node.value is not None:
                self.visit(node.value)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    self.bind(target, node.value)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind = self.source.kind(self.page, node.annotation)
                self.kinds |= {node.target.id: kind} if kind else {}
            return
        if isinstance(node, (ast.For, ast.comprehension)):
            self.visit(node.iter)
            self.bind(node.target, node.iter)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for generator in node.generators:
                self.visit(generator)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            given += [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for found in self.called(node.func) if any(map(self.comes, given)) else ():
                self.walk_into(found, node)
        elif isinstance(node, ast.Attribute) and self.comes(node.value):
            for found in self.called(node):
                if any("property" in ast.unparse(how) for how in found.node.decorator_list):
                    self.walk.enter(found, {"self"})

    def walk_into(self, found: Definition, call: ast.Call) -> None:
        """Enter a function that is called, or what initializes a class, and functions it is given."""
        for argument in call.args:
            if isinstance(argument, (ast.Name, ast.Attribute)):
                for given in self.called(argument):
                    if not isinstance(given.node, ast.ClassDef):
                        self.walk.enter(given, {a.arg for a in given.node.args.args})
        if isinstance(found.node, ast.ClassDef):
            made = (self.source.member(found, name) for name in ("__init__", "__post_init__"))
            found = next((one for one in made if isinstance(one, Definition)), found)
        if isinstance(found.node, ast.ClassDef):
            return
        names = [a.arg for a in (*found.node.args.posonlyargs, *found.node.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        tainted = {name for name, value in zip(names, call.args, strict=False) if self.comes(value)}
        tainted |= {k.arg for k in call.keywords if k.arg and self.comes(k.value)}
        tainted |= {"self", "cls"} if found.owner is not None else set()
        self.walk.enter(found, tainted)

    def called(self, node: ast.expr) -> Iterator[Definition]:
        """Yield the functions, methods or classes that an expression means."""
        if isinstance(node, ast.Name):
            found = self.source.find(self.page, node.id)
            if isinstance(found, Definition) and node.id not in self.kinds:
                yield found
        elif isinstance(node, ast.Attribute):
            within = self.source.find(self.page, node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(within, Page) and isinstance(found := self.source.find(within, node.attr), Definition):
                yield found
            kind = within if isinstance(within, Definition) else self.kind_of(node.value)
            if isinstance(kind, Definition) and isinstance(kind.node, ast.ClassDef):
                member = self.source.member(kind, node.attr)
                if isinstance(member, Definition):
                    yield member
        elif isinstance(node, ast.Call):  # such as `table.get(key, default)(arguments)`
            for argument in node.args:
                yield from self.called(argument)

    def kind_of(self, node: ast.expr) -> Definition | None:
        """Return the class of an expression, or of its elements, as far as annotations tell."""
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id)
        if isinstance(node, ast.Subscript):
            return self.kind_of(node.value)
        if isinstance(node, ast.Attribute):
            kind = self.kind_of(node.value)
            member = None if kind is None else self.source.member(kind, node.attr)
            if kind is None or member is None:
                return None
            if isinstance(member, Definition):
                assert not isinstance(member.node, ast.ClassDef)
                return self.source.kind(member.page, member.node.returns)
            return self.source.kind(kind.page, member)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("cast", "zip", "enumerate", "list", "sorted"):
                return next(filter(None, map(self.kind_of, reversed(node.args))), None)
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "keys", "values", "get"):
                return self.kind_of(node.func.value)
            for found in self.called(node.func):
                if isinstance(found.node, ast.ClassDef):
                    return self.source.behind(found)
                return self.source.kind(found.page, found.node.returns)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.kind_of(node.elt)
        return None

    def comes(self, node: ast.AST) -> bool:
        """Return whether an expression contains a name that comes from `state`."""
        return any(isinstance(x, ast.Name) and x.id in self.tainted for x in ast.walk(node))

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        """Give the names of a target the origin and the class of a value."""
        names = [x.id for x in ast.walk(target) if isinstance(x, ast.Name)]
        if self.comes(value):
            self.tainted.update(names)
        if isinstance(target, ast.Name):
            kinds = [self.kind_of(value)]
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and len(value.args) == len(names) > 1:
            kinds = [self.kind_of(argument) for argument in value.args]
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            kinds = [self.kind_of(element) for element in value.elts]
        else:
            kinds = [self.kind_of(value)] * len(names)
        for name, kind in zip(names, kinds, strict=False):
            if kind is not None:
                self.kinds[name] = kind


def main() -> None:
    """Print the counts, and with `--steps` the functions of the longer way."""
    for name, behind in (("as far as a codec", {}), ("with the codec of weights", WEIGHTS)):
        walk = Walk(behind)
        print("{}: {} files entered, {} returns to a file left before".format(name, *walk.counts()))
    if "--steps" in sys.argv:
        print("\n".join(walk.steps))


if __name__ == "__main__":
    main()
