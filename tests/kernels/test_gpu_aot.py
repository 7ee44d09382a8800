"""GPU kernels as machine code: listed, compiled without spills, rounding like the CPU."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from shrinkpoint import kernels
from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.backend.gpu import INTERPRETED
from shrinkpoint.kernels.exponent import promote
from shrinkpoint.kernels.histogram import gpu as histogram
from shrinkpoint.kernels.quantizer import Thresholds

from . import aot

OLDEST = importlib.import_module("triton").__version__.startswith("3.6.")
"""Whether this is the oldest Triton, whose compiler allocates registers differently."""
MODULES = [
    importlib.import_module(m.name)
    for m in pkgutil.walk_packages(kernels.__path__, "shrinkpoint.kernels.")
    if m.name.rpartition(".")[2] == "gpu"
]
assert len(MODULES) > 10
ROOT = Path(aot.__file__).parents[2]
BY_SIZE = {"BLOCK", "ROUNDS", "ROWS", "COLUMNS", "FIELD", "BYTES"}
"""Constants that the interpreter chooses itself, most by the size of the data."""


MIXED = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
)
"""Weights and gradients of different formats, as they occur in training, and one product in float64."""


def _compiling() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def _is_jitted(x: object) -> bool:
    return type(x).__name__ in ("JITFunction", "InterpretedFunction")


def test_every_kernel_is_listed() -> None:
    listed = {build.kernel for build in aot.builds()}
    for module in MODULES:
        for name, x in vars(module).items():
            if _is_jitted(x) and x.fn.__module__ == module.__name__ and name.endswith("_kernel"):
                assert x in listed, f"{module.__name__}.{name} is missing in aot.builds()"


def test_only_functions_named_kernels_are_launched() -> None:
    """The test above finds kernels by their names: launched by run(NAME, ...) or NAME[grid](...)."""
    launched = 0
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            kernel = _launched(node) if isinstance(node, ast.Call) else None
            if kernel is not None:
                assert isinstance(kernel, ast.Name)
                assert kernel.id.split("_")[-1] == "kernel", ast.unparse(node)
                launched += 1
    assert launched >= len({build.kernel for build in aot.builds()}) - 3  # some are launched through a variable


def _launched(call: ast.Call) -> ast.expr | None:
    """Return the kernel that a call launches."""
    if isinstance(call.func, ast.Subscript):
        return call.func.value
    written = ast.unparse(call.func)
    return call.args[0] if written.split(".")[-1] == "run" and written != "subprocess.run" else None


@pytest.mark.slow
def test_every_build_compiles_without_spills_and_rounds_like_the_cpu(tmp_path: Path) -> None:
    """Compile every build for one architecture, except those that `bench/results/aot.json` holds."""
    path, arch = tmp_path / "aot.json", aot.UNALIGNED_ARCHITECTURE
    known = ["--known", str(ROOT / "bench/results/aot.json")]
    command = [sys.executable, "-m", aot.__name__, "--arch", str(arch), *known, "--json", str(path)]
    result = subprocess.run(command, env=_compiling(), cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert path.exists(), result.stderr
    rows = json.loads(path.read_text())["rows"]
    found = [f"{row['name']} sm_{row['arch']} {row['arguments']}: {row['problems']}" for row in rows if row["problems"]]
    if OLDEST:
        # One build for unaligned arguments spills.
        assert len(found) <= 1
        assert all("rank_one.symbols_kernel" in row and "spills 16 bytes" in row for row in found)
        return
    assert found == []
    assert result.returncode == 0
    assert len(rows) == len(aot.plan((arch,)))
    assert all(row["registers"] > 0 and row["stack"] == 0 for row in rows)


def test_a_change_of_the_code_of_a_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash covers the kernel, the functions that it calls, and their constants."""
    build = next(b for b in aot.builds() if b.kernel is histogram.count_kernel)
    others = [replace(build, types="*fp64"), replace(build, launch=replace(build.launch, warps=1))]
    code = aot.code_of(build, 90, "aligned")
    assert code not in [aot.code_of(b, 90, "aligned") for b in others]
    assert code not in [aot.code_of(build, 80, "aligned"), aot.code_of(build, 90, "odd")]
    assert {"shrinkpoint.kernels.backend.gpu.bucket_of"} < {name for name, _ in aot.sources(build.kernel)}
    monkeypatch.setattr(histogram, "WINDOW", 512)
    aot.sources.cache_clear()
    assert aot.code_of(build, 90, "aligned") != code
    monkeypatch.undo()
    aot.sources.cache_clear()
    assert aot.code_of(build, 90, "aligned") == code


def test_the_plan_covers_every_build() -> None:
    """Aligned arguments for all architectures, and unaligned ones for one."""
    tasks, numbers = set(aot.plan()), range(len(list(aot.builds())))
    assert tasks >= {(i, arch, "aligned") for i in numbers for arch in aot.ARCHITECTURES}
    assert tasks >= {(i, aot.UNALIGNED_ARCHITECTURE, "unaligned") for i in numbers}
    by_gradient = [
        i for i, b in enumerate(aot.builds()) if b.kernel.fn.__name__ == "assign_kernel" and b.constants["GRADIENT"]
    ]
    assert tasks >= {(i, arch, a) for i in by_gradient for arch in aot.ARCHITECTURES for a in aot.ARGUMENTS}
    assert len(by_gradient) >= 16
    assert len(aot.plan(every=True)) == len(numbers) * len(aot.ARCHITECTURES) * len(aot.ARGUMENTS)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "fma.rn.f32"),
        ("fma.rn.ftz.f32 %f1, %f2, %f3, %f4;", "fma.rn.ftz.f32"),
        ("fma.rz.f64 %fd1, %fd2, %fd3, %fd4;", "fma.rz.f64"),
        ("fma.rn.f16x2 %r1, %r2, %r3, %r4;", "fma.rn.f16x2"),
        ("fma.rn.bf16 %rs1, %rs2, %rs3, %rs4;", "fma.rn.bf16"),
        ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", "fma.rn.bf16x2"),
        ("fma.rn.relu.bf16 %rs1, %rs2, %rs3, %rs4;", "fma.rn.relu.bf16"),
        ("mad.rn.f32 %f1, %f2, %f3, %f4;", "mad.rn.f32"),
        ("add.ftz.f32 %f1, %f2, %f3;", "add.ftz.f32"),
        ("div.full.f32 %f1, %f2, %f3;", "div.full.f32"),
        ("sqrt.approx.f32 %f1, %f2;", "sqrt.approx.f32"),
        ("div.rn.f32 %f1, %f2, %f3;", None),
        ("mul.rn.f32 %f1, %f2, %f3;", None),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", None),
        ("mad.wide.u32 %rd1, %r2, %r3, %rd4;", None),
    ],
)
def test_forbidden_instructions(line: str, found: str | None) -> None:
    match = aot.FORBIDDEN.search(line)
    assert (match.group(0) if match else None) == found


def test_what_must_not_be_is_found(tmp_path: Path) -> None:
    """A fused multiply-add, an approximate division and a spill are each reported."""
    script = tmp_path / "bad.py"
    script.write_text(
        textwrap.dedent("""
        import triton
        import triton.language as tl
        from tests.kernels import aot
        from shrinkpoint.kernels.kmeans import gpu as kmeans
        from shrinkpoint.kernels.backend.gpu import Launch

        @triton.jit
        def bad_kernel(x_ptr, out_ptr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
            lane = tl.arange(0, BLOCK)
            x = tl.load(x_ptr + lane)
            tl.store(out_ptr + lane, 1.0 / x if DIVIDE else x * x + 3.0)

        class Fused(Launch):
            @property
            def options(self):
                return {"num_warps": self.warps, "enable_fp_fusion": True}

        if __name__ == "__main__":
            for launch in (Launch(128, 4), Fused(128, 4)):
                for divide in (False, True):
                    build = aot.Build(bad_kernel, "*fp32 *fp32", launch, {"DIVIDE": divide})
                    print(aot.compile_build(build, 90).problems)
            exact = next(b for b in aot.builds() if b.kernel is kmeans.exact_kernel)
            narrow = aot.Build(exact.kernel, exact.types, Launch(2048, 8, registers=32), exact.constants)
            print(aot.compile_build(narrow, 90).problems)
            mixed = next(b for b in aot.builds() if b.name.startswith("quantizer.assign_kernel(*bf16 *fp32"))
            tight = Launch(mixed.launch.block, mixed.launch.warps, registers=48)
            tight = aot.Build(mixed.kernel, mixed.types, tight, {**mixed.constants, "STEPS": 4})
            for arguments in ("aligned", "unaligned"):
                print(aot.compile_build(tight, 90, arguments).problems)
        """)
    )
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**_compiling(), "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
    plain, divided, fused, _, narrow, aligned, unaligned = run.stdout.splitlines() or pytest.fail(run.stderr)
    assert plain == "[]"
    assert "div.full" in divided
    assert "fma.rn" in fused
    assert "spills" in narrow
    assert aligned == "[]"
    assert "spills" in unaligned or OLDEST


def test_what_is_launched_is_what_was_compiled(monkeypatch: pytest.MonkeyPatch, fresh: np.random.Generator) -> None:
    """Every launched kernel has argument types and constants that `aot.builds()` lists."""
    if not INTERPRETED:
        pytest.skip("launches are observed in the interpreter")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    seen: set[tuple[str, str, tuple[tuple[str, Any], ...]]] = set()
    run = interpreter.GridExecutor.__call__

    def observe(self: Any, *arguments: Any, **constants: Any) -> Any:
        subject = aot.subject_of(self.fn)
        types = " ".join(_type(self.fn, i, a) for i, a in enumerate(arguments))
        kept = {k: int(v) for k, v in constants.items() if k.isupper() and k not in BY_SIZE}
        seen.add((f"{subject}.{self.fn.__name__}", types, tuple(sorted(kept.items()))))
        return run(self, *arguments, **constants)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", observe)
    _call_everything(fresh)
    listed = {
        (
            b.name.split("(")[0],
            b.types,
            tuple(sorted((k, int(v)) for k, v in b.constants.items() if k not in BY_SIZE)),
        )
        for b in aot.builds()
    }
    assert {name for name, _, _ in listed} - {name for name, _, _ in seen} == set()
    assert seen - listed == set()


def _type(function: Any, number: int, argument: Any) -> str:
    """Type of an argument in the notation of `aot.Build`."""
    if isinstance(argument, torch.Tensor):
        name = str(argument.dtype).removeprefix("torch.")
        for long, short in (("bfloat", "bf"), ("float", "fp"), ("uint", "u"), ("int", "i")):
            name = name.replace(long, short)
        return f"*{name}"
    annotation = function.__annotations__[list(function.__code__.co_varnames)[number]]
    return str(annotation).rsplit(".", 1)[-1].replace("float", "fp").replace("uint", "u").replace("int", "i")


def _call_everything(rng: np.random.Generator) -> None:
    def back_end(subject: str) -> Any:
        return importlib.import_module(f"shrinkpoint.kernels.{subject}.gpu")

    wide = torch.from_numpy(rng.normal(size=600))
    codebook = np.array([-1.0, 0.0, 1.0])
    thresholds = Thresholds(protect_magnitude=2.0, prune_magnitude=0.1, protect_sensitivity=3.0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = wide.to(dtype)
        back_end("histogram").log_histogram(x, 4, signed=True)
        back_end("histogram").log_histogram(x, 4)
        back_end("histogram").kept_histogram(x, thresholds, 4)
        gradients = [x, *(wide.to(g) for w, g in MIXED if w == dtype)]
        for gradient in gradients:
            back_end("histogram").log_histogram(x, 4, gradient=gradient)
            back_end("histogram").kept_histogram(x, thresholds, 4, gradient=gradient)
        for codes in (codebook[:0], codebook, np.linspace(-1, 1, 20), np.linspace(-1, 1, 100)):
            if codes.size in (3, 100) or dtype in (torch.float32, torch.bfloat16):
                levels = back_end("quantizer").assign(x, thresholds, codes)
                for gradient in gradients:
                    back_end("quantizer").assign(x, thresholds, codes, gradient=gradient)
        code = torch.from_numpy(codes).to(dtype)
        back_end("quantizer").dequantize(levels, code)
        back_end("quantizer").dequantize(levels, code, protected=x[levels == 1])
        index = back_end("histogram").bucket_index(x, 3)
        back_end("histogram").bucket_value(index, 3, str(dtype).rsplit(".", 1)[-1])
        back_end("planes").merge_planes(back_end("planes").split_planes(x), str(dtype).rsplit(".", 1)[-1])
        for method in ("arithmetic", "xor"):
            back_end("planes").undifference(back_end("planes").difference(x, x, method), x, method)
        mask = back_end("packing").changed_mask(x, x * 2)
        back_end("packing").scatter(x, mask, back_end("packing").gather(x, mask))
        buckets = back_end("exponent").exponent_buckets(x)
        for bits in (2, 9):  # levels of one byte and of two
            promotion = promote(buckets, bits)
            ranks = back_end("exponent").exponent_quantize(x, promotion)
            assert ranks.dtype == (torch.uint8 if bits == 2 else torch.uint16)
            back_end("exponent").exponent_dequantize(ranks, promotion.codebook)
            back_end("exponent").exponent_sums(x, ranks, promotion.codebook)
        back_end("exponent").exponent_differences(x, x)
        back_end("cluster").cluster_dequantize(*back_end("cluster").cluster_quantize(x, 4))
        back_end("error_sums").distortion(x, x)
        for earlier in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            back_end("rate_distortion").extrapolate(x, wide.to(earlier), 0.5)
        matrix = x.reshape(3, 200)
        for method in ("symmetric", "asymmetric", "adaptive"):
            codes_, scale, minimum = back_end("rows").row_quantize(matrix, 2, method, num_bins=3)
        back_end("rows").row_dequantize(codes_, scale, minimum)
        if dtype in (torch.float32, torch.float64):
            back_end("multiples").square_sum(x)
            for whole in ("int16", "int32"):
                multiples = back_end("multiples").step_multiples(x, 0.1, whole)
                back_end("multiples").step_values(multiples, 0.1, str(dtype).rsplit(".", 1)[-1])
        prices = np.zeros((5, 5), np.float32)
        fine = torch.from_numpy(rng.integers(0, 5, 600).astype(np.uint8))
        for importance in (None, torch.ones(x.shape[0], dtype=torch.float32, device=x.device)):
            back_end("rate_distortion").rate_distortion_levels(
                x, fine, fine, codebook.astype(np.float32), prices, importance
            )
            bounds = np.zeros((5, 5, 4), np.float32)
            back_end("rate_distortion").unsettled(x, fine, fine, bounds, importance)
    back_end("cluster").cluster_quantize(wide.repeat(2), 4)
    flags = back_end("packing").unpack_mask(mask, 600)
    back_end("packing").pack_mask(flags)
    for bits in (2, 4, 8):
        codes_, book = back_end("rows").row_kmeans(wide.float().reshape(3, 200), bits, iterations=1)
    back_end("rows").row_lookup(codes_, book)
    for kind, width in (("uint8", 3), ("uint16", 9), ("uint32", 17)):
        values = torch.from_numpy(rng.integers(0, 8, 600).astype(kind))
        back_end("packing").unpack_bits(back_end("packing").pack_bits(values, width), width, 600, kind)
    for bits in (0, 1, 16):
        index = back_end("histogram").bucket_index(wide.float(), bits)
        octaves = back_end("scales").split_octaves(index, bits, FORMATS["float32"].buckets(bits))
        streams = {x: torch.tensor(getattr(octaves, x)) for x in ("symbols", "negative", "fraction")}
        back_end("scales").join_octaves(replace(octaves, **streams), bits, FORMATS["float32"].buckets(bits))
    for width in (8, 16, 32, 64):
        old = torch.from_numpy(rng.integers(0, 99, 600).astype(f"uint{width}"))
        new = torch.from_numpy(old.numpy() ^ (rng.random(600) < 0.1).astype(f"uint{width}"))
        for edges in ((), (1, 2, 3, 4, 5, 6, 7)):
            for kind, method in (("float8_e5m2" if width == 8 else f"float{width}", "arithmetic"), ("uint8", "xor")):
                name = kind if method == "arithmetic" else f"uint{width}"
                found = back_end("sparse_delta").collect_changes(new, old, edges, 600, None, name)
                back_end("sparse_delta").apply_changes(old, found, edges, method, None, name)
                back_end("sparse_delta").locate_changes(old, found, edges, method, name)
    for size in (5, 40):
        keys = torch.from_numpy(rng.integers(0, size, 600).astype(np.uint8))
        back_end("levels").undelta(keys, back_end("levels").delta(keys, keys.flip(0), size), size)
        grouped, _ = back_end("levels").split_by_level(keys.flip(0), keys, size)
        back_end("levels").merge_by_level(grouped, keys, size)
        back_end("levels").joint_counts(keys, keys, size, size)
    table = np.array([[1024, 3072], [4096, 0]], np.uint32)
    zeros = torch.zeros(5, dtype=torch.uint8)
    for lanes in (4, 64):
        for contexts in (None, zeros):
            data = back_end("rans").rans_encode(zeros, contexts, table, 12, lanes)
            back_end("rans").rans_decode(data, contexts, table, 12, 5, lanes)
    points, weights = torch.sort(wide[:20]).values, torch.ones(20, dtype=torch.float64)
    for method in ("exact", "kmeans++"):
        back_end("kmeans").weighted_kmeans_many([(points, weights)], [3], method, [None], 0, 50)
    square = (wide * wide).float()
    symbols, _, _ = back_end("moment_grid").grid_symbols(wide.float(), square, 0.5)
    back_end("moment_grid").grid_values(symbols, square, np.ones(256, np.float32))
    back_end("moment_grid").grid_products(wide.float(), square, symbols, np.ones(256, np.float32))
    r, c, whole = np.ones(3, np.float32), np.ones(200, np.float32), np.array([[3, 200]])
    symbols, _, _ = back_end("scales").residual_symbols(square, r, c, whole, 0, 24, None)
    back_end("scales").residual_values(symbols, r, c, whole, 0, np.ones(256, np.float32))
