"""Compilation of every GPU kernel in every launched configuration, without a GPU.

    python -m tests.kernels.aot [--arch 90] [--every] [--known FILE] [--json FILE]

compiles the builds of `plan()` and prints registers, shared memory and spills. Triton makes another build of a kernel
for arguments that are not multiples of 16, such as an unaligned slice or an odd number of elements, so each entry of
`builds()` is examined with both (`ARGUMENTS`). An entry fails if a thread spills to its stack, or if its PTX fuses
multiplication and addition, flushes subnormals to zero, or divides or takes roots approximately. The CPU does none of
these, and the results must agree to the bit.

With `--known` a build whose code has not changed since FILE was written is not compiled again, except each 40th, which
must give what FILE says.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shrinkpoint.kernels.backend.gpu import Launch
from shrinkpoint.kernels.cluster import MOST, SHIFT, SUM_BLOCK
from shrinkpoint.kernels.cluster import gpu as cluster
from shrinkpoint.kernels.error_sums import gpu as error_sums
from shrinkpoint.kernels.exponent import gpu as exponent
from shrinkpoint.kernels.histogram import gpu as histogram
from shrinkpoint.kernels.kmeans import gpu as kmeans
from shrinkpoint.kernels.levels import gpu as levels
from shrinkpoint.kernels.moment_grid import ESCAPE as OFF_GRID
from shrinkpoint.kernels.moment_grid import FARTHEST as FARTHEST_POINT
from shrinkpoint.kernels.moment_grid import gpu as moment_grid
from shrinkpoint.kernels.multiples import LANES, PART
from shrinkpoint.kernels.multiples import gpu as multiples
from shrinkpoint.kernels.packing import gpu as packing
from shrinkpoint.kernels.planes import gpu as planes
from shrinkpoint.kernels.quantizer import gpu as quantizer
from shrinkpoint.kernels.rans import STATES, WIDE_STATES
from shrinkpoint.kernels.rans import gpu as rans
from shrinkpoint.kernels.rate_distortion import gpu as rate_distortion
from shrinkpoint.kernels.rows import ERROR_STEPS, KMEANS_STEPS
from shrinkpoint.kernels.rows import gpu as rows
from shrinkpoint.kernels.scales import FARTHEST as FARTHEST_CELL
from shrinkpoint.kernels.scales import FIRST, SCALE
from shrinkpoint.kernels.scales import gpu as scales
from shrinkpoint.kernels.sparse_delta import gpu as sparse_delta

Task = tuple[int, int, str]
"""Number of a build, compute capability, kind of arguments."""

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: A100, H100 / H200, B200."""

ARGUMENTS = ("aligned", "odd", "unaligned")
"""Properties of arguments known to Triton: tensors and n are multiples of 16, only the tensors are, or neither is."""

UNALIGNED_ARCHITECTURE = 90
"""Architecture for which every build is also compiled unaligned; for the others only those with `_is_full`."""

FORBIDDEN = re.compile(
    r"\b(fma\.r[nzmp]\S*\.b?f\d|mad\.r[nzmp]\S*\.f\d|\S+\.ftz\b|div\.(approx|full)|sqrt\.approx|rsqrt|ex2|lg2)\S*"
)
"""PTX in which a result would differ from the other back ends'."""


def subject_of(function: Any) -> str:
    """Return the subject of a kernel: the folder of its module."""
    return str(function.__module__).removesuffix(".gpu").rpartition(".")[2]


@dataclass(frozen=True)
class Build:
    """A kernel in one launch configuration: argument types, constants and options."""

    kernel: Any
    types: str
    """Types of the arguments that are not constants, in order, separated by blanks."""
    launch: Launch
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the build: subject, kernel, types of its arguments, constants."""
        subject = subject_of(self.kernel.fn)
        constants = ",".join(f"{k}={v}" for k, v in self.constants.items() if k != "BLOCK")
        return f"{subject}.{self.kernel.fn.__name__}({self.types}; {constants})"


@dataclass(frozen=True)
class Report:
    """Resources that a build uses per thread and per program, and its problems."""

    name: str
    arch: int
    arguments: str
    warps: int
    registers: int
    shared: int
    stack: int
    problems: list[str]
    code: str
    """Hash of its source, see `code_of`."""


FLOATS = {"fp16": (16, 10), "bf16": (16, 7), "fp32": (32, 23), "fp64": (64, 52)}
MIXED = (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "fp64"))
"""Compiled pairs of different formats of weights and gradients: both orders of widths, and products in float64."""
OCTAVES = {"fp16": 40, "bf16": 261, "fp32": 277, "fp64": 2098}


def builds() -> Iterator[Build]:
    """Yield every kernel in every configuration, for a representative set of dtypes.

    Configurations that differ only in a number count as one.
    """
    yield from _histogram()
    yield from _assign()
    yield from _levels()
    yield from _elementwise()
    yield from _mask()
    yield from _sparse_delta()
    yield from _bitpack()
    yield from _octaves()
    yield from _kmeans()
    yield from _exponent()
    yield from _cluster()
    yield from _rows()
    yield from _multiples()
    yield from _optimizer()
    yield from _rans()


def _histogram() -> Iterator[Build]:
    kernel, launch = histogram.count_kernel, histogram.COUNT
    others = "*i64 i32 i32 i32 i32 *i32"
    for x in FLOATS:
        for signed, kept in ((False, 0), (True, 0), (True, 1)):
            constants = {**_counted(x), "SIGNED": signed, "PRODUCT": False, "DOUBLE": False, "KEPT": kept}
            yield Build(kernel, f"*{x} *{x} {others}", launch, constants)
    for x, gradient in (*zip(FLOATS, FLOATS, strict=True), *MIXED):
        double = "fp64" in (x, gradient)
        constants = {**_counted("fp64" if double else "fp32"), "SIGNED": False, "PRODUCT": True}
        yield Build(kernel, f"*{x} *{gradient} {others}", launch, {**constants, "DOUBLE": double, "KEPT": 0})
        constants = {**_counted(x), "SIGNED": True, "PRODUCT": False}
        yield Build(kernel, f"*{x} *{gradient} {others}", launch, {**constants, "DOUBLE": double, "KEPT": 2})


def _counted(name: str) -> dict[str, int]:
    """Compile-time constants of a histogram of this format."""
    width, mantissa = FLOATS[name]
    return {"FIELDS": histogram.FIELDS, "WIDTH": width, "M": mantissa, "WINDOW": histogram.WINDOW}


def _assign() -> Iterator[Build]:
    numbers = "i64 i64 i64 i64 i64 *u8"
    for x, gradient in (*zip(FLOATS, [None] * 4, strict=True), *zip(FLOATS, FLOATS, strict=True), *MIXED):
        edges = "*fp64" if x == "fp64" else "*fp32"
        constants = {"WIDTH": FLOATS[x][0], "GRADIENT": gradient is not None}
        constants["DOUBLE"] = gradient is not None and "fp64" in (x, gradient)
        for steps in _searches(x):
            types = f"*{x} *{gradient or x} {edges} {numbers}"
            every = {**constants, "STEPS": steps, "PIVOTS": quantizer.PIVOTS}
            yield Build(quantizer.assign_kernel, types, quantizer.ASSIGN, every)
    yield Build(quantizer.protected_kernel, "*u8 i64 *i32 *i32", quantizer.VALUES)
    for value in ("i16", "i32", "i64"):
        for protected in (False, True):
            types = f"*u8 *{value} *{value} *i64 i64 *{value}"
            yield Build(quantizer.values_kernel, types, quantizer.VALUES, {"PROTECTED": protected})


def _searches(x: str) -> tuple[int, ...]:
    """Boundary searches to compile for a format: all, or the shortest and the longest.

    The shortest needs most registers.
    """
    return (-1, *quantizer.SEARCHES) if x in ("fp32", "bf16") else quantizer.SEARCHES[:: len(quantizer.SEARCHES) - 1]


def _levels() -> Iterator[Build]:
    yield Build(levels.subtract_kernel, "*u8 *u8 i64 i32 *u8 *i32", levels.SUBTRACT)
    for bins in (32, 256):
        yield Build(levels.count_keys_kernel, "*u8 i64 i64 i32 *i32 *i32", levels.GROUP, {"BINS": bins})
    for bins, table in ((32, 0), (256, 0), *((32, table) for table in levels.PAIR_TABLES)):
        constants = {"BINS": bins, "TABLE": table}
        yield Build(levels.pairs_kernel, "*u8 *u8 i64 i32 i32 i32 *i32 *i32", levels.PAIRS, constants)
    for split in (False, True):
        constants = {"SPLIT": split, "FIELD": levels.GROUP.block.bit_length() - 1}
        yield Build(levels.regroup_kernel, "*u8 *u8 *i64 *i32 i64 i64 i32 *u8", levels.GROUP, constants)


def _elementwise() -> Iterator[Build]:
    for x, (width, mantissa) in FLOATS.items():
        constants = {"WIDTH": width, "M": mantissa, "OCTAVES": OCTAVES[x]}
        yield Build(histogram.index_kernel, f"*i{width} i64 i32 *i32", histogram.ELEMENTS, constants)
        yield Build(histogram.value_kernel, f"*i32 i64 i32 *i{width}", histogram.ELEMENTS, constants)
    for itemsize in (1, 2, 4, 8):
        kind = "u8" if itemsize == 1 else f"i{8 * itemsize}"
        for rotation in (0, 1):
            constants = {"ITEMSIZE": itemsize, "ROTATION": rotation}
            yield Build(planes.split_kernel, f"*{kind} i64 *u8", planes.ELEMENTS, constants)
            yield Build(planes.merge_kernel, f"*u8 i64 *{kind}", planes.ELEMENTS, constants)
        yield Build(planes.xor_kernel, f"*{kind} *{kind} i64 *{kind}", planes.ELEMENTS)
        for floating in (False, True):
            constants = {"WIDTH": 8 * itemsize, "FLOAT": floating}
            yield Build(planes.difference_kernel, f"*{kind} *{kind} i64 *{kind}", planes.ELEMENTS, constants)
            yield Build(planes.undifference_kernel, f"*{kind} *{kind} i64 *{kind}", planes.ELEMENTS, constants)


def _mask() -> Iterator[Build]:
    yield Build(packing.pack_mask_kernel, "*u8 *u8 i64 *u8", packing.PACK_MASK, {"COMPARE": False})
    yield Build(packing.unpack_mask_kernel, "*u8 i64 *u8", packing.UNPACK_MASK)
    yield Build(packing.count_kernel, "*u8 i64 *i32", packing.MOVE, {"BYTES": packing.MOVE.block // 8})
    for kind in ("u8", "i16", "i32", "i64"):
        yield Build(packing.pack_mask_kernel, f"*{kind} *{kind} i64 *u8", packing.PACK_MASK, {"COMPARE": True})
        yield Build(packing.gather_kernel, f"*{kind} *u8 *i64 *i32 i64 *{kind}", packing.MOVE)
        yield Build(packing.scatter_kernel, f"*{kind} *{kind} *u8 *i64 *i32 i64 *{kind}", packing.MOVE)


def _sparse_delta() -> Iterator[Build]:
    for width, kind in ((8, "u8"), (16, "i16"), (32, "i32"), (64, "i64")):
        for edges in (0, sparse_delta.CLASSES - 1):
            shared = {"WIDTH": width, "EDGES": edges}
            for compare in (False, True):
                types = f"*{kind} *{kind} *i64 i64 i64 *i32"
                yield Build(sparse_delta.count_kernel, types, sparse_delta.COLLECT, {**shared, "COMPARE": compare})
            types = f"*{kind} *i64 *u8 *i64 i64 i64 *i32"
            yield Build(sparse_delta.flag_count_kernel, types, sparse_delta.APPLY, shared)
            for floating, xor in ((True, False), (False, True)):
                types = f"*{kind} *{kind} *i64 *i64 i64 i64 *i64 *{kind}"
                constants = {"WIDTH": width, "FLOAT": floating, "EDGES": edges}
                yield Build(sparse_delta.collect_kernel, types, sparse_delta.COLLECT, constants)
                shared = {"WIDTH": width, "FLOAT": floating, "XOR": xor, "EDGES": edges}
                for emit in (False, True):
                    types = f"*{kind} *i64 *u8 *i64 *i64 *{kind} i64 i64 *{kind} *i64"
                    yield Build(sparse_delta.apply_kernel, types, sparse_delta.APPLY, {**shared, "EMIT": emit})
    for classes in (1, sparse_delta.CLASSES):
        types = "*i64 *i64 *i64 *i64 i64 *u8 *i32"
        yield Build(sparse_delta.mark_kernel, types, sparse_delta.APPLY, {"CLASSES": classes})


def _bitpack() -> Iterator[Build]:
    for kind in ("u8", "i16", "i32"):
        yield Build(packing.pack_kernel, f"*{kind} i64 i64 i32 *i32 *i32", packing.PACK)
        yield Build(packing.unpack_kernel, f"*u8 i64 i64 i32 *{kind}", packing.UNPACK)


def _octaves() -> Iterator[Build]:
    yield Build(scales.range_kernel, "*i32 i64 i64 i32 *i32", scales.SPLIT)
    yield Build(scales.count_kernel, "*u8 i64 *i32", scales.JOIN)
    for count in (0, 1, 2):
        types = "*i32 *i64 *i32 i64 i64 i64 i32 i32 i32 *u8 *u8 *i64"
        yield Build(scales.split_kernel, types, scales.SPLIT, {"PLANES": count})
        types = "*u8 *u8 *u8 *i64 *i32 i64 i64 i32 i32 i32 *i32"
        yield Build(scales.join_kernel, types, scales.JOIN, {"PLANES": count})


def _kmeans() -> Iterator[Build]:
    constants = {"FIELDS": kmeans.FIELDS, "CODES": kmeans.LLOYD.block}
    types = "*fp64 *fp64 *fp64 *fp64 *i64 *fp64 *i32 *fp64"
    yield Build(kmeans.exact_kernel, types, kmeans.EXACT, constants)
    types = "*fp64 *fp64 *i64 *fp64 *fp64 *fp64 *fp64 *i32"
    yield Build(kmeans.prepare_kernel, types, kmeans.EXACT, {"FIELDS": kmeans.FIELDS})
    types = "*fp64 *fp64 *i64 i32 *fp64 *fp64"
    yield Build(kmeans.lloyd_kernel, types, kmeans.LLOYD, {"FIELDS": kmeans.FIELDS})


def _exponent() -> Iterator[Build]:
    for x, (width, mantissa) in FLOATS.items():
        constants = {"WIDTH": width, "M": mantissa}
        types = f"*{x} *u8 *{x} i64 i32 *i{width} *i32"
        yield Build(exponent.sums_kernel, types, exponent.ADD, constants)
        yield Build(exponent.sums_kernel, types.replace("u8", "u16"), exponent.ADD, constants)
        if x == "fp16":
            width, mantissa = FLOATS["fp32"]
        constants = {"WIDTH": width, "M": mantissa}
        types = f"*{x} *{x} i64 *i{width}"
        yield Build(exponent.differences_kernel, types, exponent.LOOK_UP, constants)
    for width, mantissa in FLOATS.values():
        magnitude = "*i64" if width == 64 else "*i32"
        constants = {"WIDTH": width, "M": mantissa}
        types = f"*i{width} i64 i32 *i32 {magnitude} {magnitude}"
        yield Build(exponent.extremes_kernel, types, exponent.COUNT, constants)
        for level in ("u8", "u16"):
            types = f"*i{width} *{level} i64 *{level}"
            yield Build(exponent.quantize_kernel, types, exponent.LOOK_UP, constants)
    for width in (16, 32, 64):
        for level in ("u8", "u16"):
            yield Build(exponent.look_up_kernel, f"*{level} *i{width} i64 i32 *i{width} *i32", exponent.LOOK_UP)


def _cluster() -> Iterator[Build]:
    tall = {"ROWS": cluster.SUMS.block // SUM_BLOCK}
    for x in FLOATS:
        yield Build(cluster.sums_kernel, f"*{x} i64 i64 *fp64", cluster.SUMS, {"FIRST": True, **tall})
        yield Build(cluster.label_kernel, f"*{x} *fp32 i64 i32 *u8 *i32 *i32", cluster.LABEL, {"LABELS": MOST})
        types = f"*{x} *u8 *fp32 *fp32 *u8 *fp32 i64 *u8"
        yield Build(cluster.encode_kernel, types, cluster.ELEMENTS, {"SHIFT": SHIFT})
    yield Build(cluster.sums_kernel, "*fp64 i64 i64 *fp64", cluster.SUMS, {"FIRST": False, **tall})
    yield Build(cluster.decode_kernel, "*u8 *u8 *fp32 *fp32 *fp32 i64 i32 *fp32 *i32", cluster.ELEMENTS)


def _rows() -> Iterator[Build]:
    for columns in rows.COLUMNS:
        tile = {"ROWS": rows.TILE.block // columns, "COLUMNS": columns}
        for x in FLOATS if columns == rows.COLUMNS[-1] else ("fp32", "bf16"):
            types = f"*{x} i64 i64 fp32 i32 i32 *fp32 *u8 *fp32 *fp32"
            for method in rows.METHODS.values():
                constants = {"METHOD": method, "ERROR_STEPS": ERROR_STEPS, **tile}
                yield Build(rows.quantize_kernel, types, rows.TILE, constants)
        for entries in rows.ENTRIES:
            constants = {"STEPS": KMEANS_STEPS, "ENTRIES": entries, "COLUMNS": columns}
            constants["ROWS"] = rows.kmeans_rows(columns, entries)
            types = "*fp32 i64 i64 i32 i32 *i32 *i32 *u8 *fp32"
            yield Build(rows.kmeans_kernel, types, rows.KMEANS, constants)
        yield Build(rows.dequantize_kernel, "*u8 *fp32 *fp32 i64 i64 i64 *fp32", rows.TILE, tile)
        yield Build(rows.lookup_kernel, "*u8 *fp32 i64 i64 i64 i32 *fp32 *i32", rows.TILE, tile)


def _multiples() -> Iterator[Build]:
    for x in ("fp32", "fp64"):
        constants = {"LANES": LANES, "STEPS": PART // LANES}
        yield Build(multiples.squares_kernel, f"*{x} *i64 i64 *fp64", multiples.SQUARES, constants)
        for whole in ("i16", "i32"):
            yield Build(multiples.multiples_kernel, f"*{x} i64 fp64 *{whole}", multiples.ELEMENTS)
            yield Build(multiples.values_kernel, f"*{whole} i64 fp64 *{x}", multiples.ELEMENTS)


def _optimizer() -> Iterator[Build]:
    types = "*fp32 *fp32 i64 fp32 *u8 *i32 *fp64"
    yield Build(moment_grid.symbols_kernel, types, moment_grid.SYMBOLS, {"FARTHEST": FARTHEST_POINT})
    yield Build(moment_grid.values_kernel, "*u8 *fp32 *fp32 i64 *fp32", moment_grid.VALUES)
    types = "*fp32 *fp32 *u8 *fp32 i64 *fp64"
    yield Build(moment_grid.products_kernel, types, moment_grid.VALUES, {"ESCAPE": OFF_GRID})
    for wide in (False, True):
        types = "*fp32 *fp32 *fp32 i64 i64 i64 i32 *fp32 *u8 *u8 *i32 *fp64"
        for settled in (False, True):
            constants = {"FIRST": FIRST, "FARTHEST": FARTHEST_CELL, "SCALE": SCALE, "SETTLED": settled, "WIDE": wide}
            yield Build(scales.symbols_kernel, types, scales.SYMBOLS, constants)
        types = "*u8 *fp32 *fp32 *fp32 i64 i64 i64 *fp32"
        yield Build(scales.values_kernel, types, scales.VALUES, {"WIDE": wide})
    for x in FLOATS:
        for weighted in (False, True):
            types = f"*{x} *u8 *u8 *fp32 *fp32 *fp32 i64 i32 i32 *u8 *i32"
            yield Build(rate_distortion.choose_kernel, types, rate_distortion.CHOOSE, {"WEIGHTED": weighted})
            types = f"*{x} *u8 *u8 *fp32 *fp32 i64 i32 i32 *u8 *i32"
            yield Build(rate_distortion.unsettled_kernel, types, rate_distortion.SETTLE, {"WEIGHTED": weighted})
        yield Build(error_sums.distortion_kernel, f"*{x} *{x} i64 *fp64", error_sums.SUMS)
        double = x == "fp64"
        for earlier in FLOATS:
            types = f"*{x} *{earlier} i64 fp64 *{'fp64' if double else 'fp32'}"
            yield Build(rate_distortion.extrapolate_kernel, types, rate_distortion.ELEMENTS, {"DOUBLE": double})


def _rans() -> Iterator[Build]:
    for lanes in (STATES, WIDE_STATES):
        for contexts in (False, True):
            constants = {"CONTEXTS": contexts, "LANES": lanes}
            types = "*u8 *u8 *i32 *i64 *i64 *i16 *i32 *i64"
            yield Build(rans.encode_kernel, types, rans.CODE, constants)
            yield Build(rans.decode_kernel, "*u8 *u8 *i32 *u8 *i64 *u8 *i32", rans.CODE, constants)


def plan(architectures: tuple[int, ...] = ARCHITECTURES, *, every: bool = False) -> list[Task]:
    """List the builds to compile: number, architecture, and known properties of arguments.

    Every build is compiled for every architecture with aligned arguments, and for one architecture unaligned. Builds
    close to their register limit, and with `every` all builds, are compiled for every architecture and argument kind.
    """
    tasks = []
    for number, build in enumerate(builds()):
        for arch in architectures:
            few = ("aligned", "unaligned") if arch == UNALIGNED_ARCHITECTURE else ("aligned",)
            tasks += [(number, arch, a) for a in (ARGUMENTS if every or _is_full(build) else few)]
    return tasks


def _is_full(build: Build) -> bool:
    """Return whether unaligned loads may need more registers than the GPU has.

    They take one instruction and one address per element.
    """
    return build.kernel is quantizer.assign_kernel and bool(build.constants["GRADIENT"])


def compile_build(build: Build, arch: int, arguments: str = "aligned") -> Report:
    """Compile one build for one architecture and examine the result."""
    kernel, code = build.kernel, code_of(build, arch, arguments)
    given = dict(build.constants)
    names = [p.name for p in kernel.params]
    if "BLOCK" in names:
        given["BLOCK"] = build.launch.block
    if "ROUNDS" in names:
        given["ROUNDS"] = build.launch.rounds
    types = iter(build.types.split())
    signature = {p.name: "constexpr" if p.is_constexpr else next(types) for p in kernel.params}
    # As at run time: an allocation starts at a multiple of 16 bytes, and most have a multiple of 16 elements.
    known = {"aligned": ("*", "n"), "odd": ("*",), "unaligned": ()}[arguments]
    attributes = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if not p.is_constexpr
        and not p.do_not_specialize_on_alignment
        and ("*" if signature[p.name].startswith("*") else p.name) in known
    }
    source = ASTSource(kernel, signature, given, attributes)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=build.launch.options)
    except Exception as error:  # a compiler error is this build's problem; the other builds still run
        return Report(build.name, arch, arguments, build.launch.warps, 0, 0, 0, [f"does not compile: {error}"], code)
    usage = _resource_usage(compiled.asm["cubin"])
    # The compiler may reserve a stack that no instruction uses.
    stack = usage["STACK"] if usage["STACK"] and _uses_local_memory(compiled.asm["cubin"]) else 0
    problems = [f"spills {stack} bytes of stack"] if stack else []
    problems += sorted({f"{m.group(0)} in the PTX" for m in FORBIDDEN.finditer(compiled.asm["ptx"])})
    shared = compiled.metadata.shared
    return Report(build.name, arch, arguments, build.launch.warps, usage["REG"], shared, stack, problems, code)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Resource usage of the one kernel in a cubin."""
    text = _examined(cubin, "cuobjdump", "--dump-resource-usage")
    return {key: int(value) for key, value in re.findall(r"\b([A-Z]+)(?:\[\d+\])?:(\d+)", text)}


def _uses_local_memory(cubin: bytes) -> bool:
    """Return whether an instruction of a cubin reads or writes the stack."""
    return re.search(r"\b(LDL|STL)\b", _examined(cubin, "nvdisasm")) is not None


def _examined(cubin: bytes, tool: str, *options: str) -> str:
    """Output of one of Triton's tools for a cubin."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout


def code_of(build: Build, arch: int, arguments: str) -> str:
    """Return a hash of all that a build and its report come from, except the compiler."""
    parts = [sources(build.kernel), build.types, build.launch, build.constants, arch, arguments, _examination()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _examination() -> tuple[str, ...]:
    """Return the code that makes a report."""
    return FORBIDDEN.pattern, *(inspect.getsource(f) for f in (compile_build, _resource_usage, _uses_local_memory))


@functools.cache
def sources(kernel: Any) -> tuple[tuple[str, str], ...]:
    """Return the code of a kernel and its callees, without comments, and their constants."""
    found: dict[str, str] = {}

    def visit(function: Any) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        if name in found:
            return
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        found[name] = "\n".join(ast.unparse(x) for x in (tree.args, *tree.body) if not _is_text(x))
        for node in ast.walk(tree):
            value = _named(node, function.__globals__)
            if hasattr(value, "fn"):
                visit(value.fn)
            elif isinstance(value, int | float | str | triton.language.constexpr):
                found[f"{name}: {ast.unparse(node)}"] = repr(value)

    visit(kernel.fn)
    return tuple(sorted(found.items()))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _named(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return what a name, or a name in a module, stands for."""
    if isinstance(node, ast.Attribute):
        owner = _named(node.value, names)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _compile_numbered(task: Task) -> Report:
    """Compile a build by its number, in another process: kernels cannot be pickled."""
    number, arch, arguments = task
    return compile_build(list(builds())[number], arch, arguments)


def compile_all(tasks: list[Task], processes: int = 2) -> list[Report]:
    """Compile builds, in the order of the tasks."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile_numbered, tasks, chunksize=8))


def read_known(path: Path) -> dict[str, Report]:
    """Return the reports of a file by their code; none if another compiler made them."""
    found = json.loads(path.read_text())
    if found["versions"] != versions():
        return {}
    return {row["code"]: Report(**row) for row in found["rows"]}


def versions() -> dict[str, str]:
    """Return the versions of the compilers."""
    return {name: metadata.version(name) for name in ("triton", "torch")}


def reports_of(tasks: list[Task], known: dict[str, Report], processes: int = 2) -> list[Report]:
    """Return the reports of tasks: known ones, except each 40th, are not made again."""
    listed = list(builds())
    codes = [code_of(listed[number], arch, arguments) for number, arch, arguments in tasks]
    wanted = [i for i, code in enumerate(codes) if code not in known or i % 40 == 0]
    compiled = dict(zip(wanted, compile_all([tasks[i] for i in wanted], processes), strict=True))
    for i, report in compiled.items():
        if report != known.get(codes[i], report):
            report.problems.append(f"differs from the known {known[codes[i]]}")
    return [compiled[i] if i in compiled else known[code] for i, code in enumerate(codes)]


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, and write the JSON; returns 1 if any build has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.aot", description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="compute capability; default 80, 90 and 100")
    parser.add_argument("--every", action="store_true", help="each build with each kind of arguments (`ARGUMENTS`)")
    parser.add_argument("--known", type=Path, help="an earlier --json: builds of the same code are not compiled again")
    parser.add_argument("--json", type=Path, help="where to write what each build uses")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    tasks = plan(tuple(options.arch or ARCHITECTURES), every=options.every)
    reports = reports_of(tasks, read_known(options.known) if options.known else {}, options.processes)
    for r in reports:
        used = f"{r.registers:4d} registers {r.shared:6d} B shared"
        print(f"sm_{r.arch} {r.arguments:9s} {used}  {r.name}  {'; '.join(r.problems)}")
    if options.json:
        lines = ",\n".join(json.dumps(asdict(r)) for r in reports)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(f'{{"versions": {json.dumps(versions())}, "rows": [\n{lines}\n]}}\n')
    return int(any(r.problems for r in reports))


if __name__ == "__main__":
    sys.exit(main())
