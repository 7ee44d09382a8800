"""Check-N-Run: quantized rows, deltas of changed rows, widths by number of restores."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.embeddings import rows as codec
from shrinkpoint.codec.embeddings.row_reference import (
    RAW,
    RowsReference,
    Style,
    dequantized,
    joined,
    quantized,
    replaced,
    same_records,
    sample_sizes,
    search_parameters,
)
from shrinkpoint.codec.groups import Coded
from shrinkpoint.codec.state.leaves import LeafSpec, read_leaf
from shrinkpoint.kernels.packing import pack_mask
from shrinkpoint.kernels.rows import row_dequantize, row_kmeans, row_lookup, row_quantize

from ..seeds import fresh_seed
from .common import bits as bits_of
from .common import difference, put_together, small_chunks, take_apart, threads, through_bytes

DTYPES = ("float16", "bfloat16", "float32", "float64")


def table(rows: int = 200, columns: int = 32, seed: int = 0) -> np.ndarray[Any, Any]:
    """An embedding table: rows of different size, with tails."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, columns)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)


def as_library(x: np.ndarray[Any, Any], library: str, dtype: str) -> Any:
    if library == "torch":
        return torch.from_numpy(x.copy()).to(getattr(torch, dtype))
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def host(x: Any) -> np.ndarray[Any, Any]:
    """Return an array as float64 in NumPy."""
    return x.double().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float64)


def cfg(*args: Any, **kwargs: Any) -> sp.Config:
    return sp.Config([("embedding", sp.Rows(*args, **kwargs))])


def save(x: Any, prev: sp.Checkpoint | None, config: sp.Config, rows: Any = None, base: Any = None) -> sp.Checkpoint:
    kind = sp.Kind("embedding", rows=rows, rows_since_base=base)
    return sp.compress({"emb": x}, prev, config, kinds={"emb": kind})


def stored_rows(ckpt: sp.Checkpoint) -> int:
    """Count the rows that a checkpoint of one table stores."""
    from shrinkpoint.codec import entropy
    from shrinkpoint.codec.format.fields import Reader

    header, chunks = take_apart(ckpt.to_bytes())
    (record,) = header["groups"]
    rows, columns = header["arrays"][0]["s"]
    step = max(1, codec.CHUNK // columns)
    body, at, count = b"".join(chunks), 0, 0
    for i, n in enumerate(record["b"]):
        symbols = entropy.decode(Reader(body[at : at + n], "test").block(), min(step, rows - i * step))
        count += int(np.count_nonzero(symbols))
        at += n
    return count


def packed(rows: int, marked: Any) -> np.ndarray[Any, Any]:
    flags = np.zeros(rows, bool)
    flags[marked] = True
    return pack_mask(flags)


# ------------------------------------------------------------------ stored rows equal those of the kernels


@given(
    dtype=st.sampled_from(DTYPES),
    library=st.sampled_from(["torch", "numpy"]),
    width=st.sampled_from([2, 3, 4, 8]),
    method=st.sampled_from(["adaptive", "asymmetric", "symmetric", "kmeans"]),
    columns=st.integers(20, 41),
    coder=st.sampled_from(["smallest", "published"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_rows_are_the_kernels_rows(
    dtype: str, library: str, width: int, method: str, columns: int, coder: str, seed: int
) -> None:
    if library == "numpy" and dtype == "bfloat16":
        dtype = "float32"
    x = as_library(table(60, columns, seed), library, dtype)
    config = cfg(width, method, num_bins=20, ratio=0.5, coder=coder)
    ckpt = save(x, None, config)
    got = through_bytes(ckpt)["emb"]
    (row,) = ckpt.summary()
    assert row.stream == "rows"
    assert difference({"emb": got}, sp.decompress(ckpt)) == ""
    if row.measure == "exact":
        assert width == 8 or method == "kmeans"
        assert bits_of(got) == bits_of(x)
        return
    if method == "kmeans":
        want = row_lookup(*row_kmeans(x, width))
    elif width == 8 and method == "adaptive":
        want = row_dequantize(*row_quantize(x, 8, "asymmetric"))
    else:
        want = row_dequantize(*row_quantize(x, width, method, num_bins=20, ratio=0.5))  # type: ignore[arg-type]
    if library == "torch":
        assert torch.equal(got, want.to(x.dtype))
    else:
        np.testing.assert_array_equal(got, want.astype(x.dtype))
    miss = np.linalg.norm(host(got) - host(x)) / np.linalg.norm(host(x))
    assert 0.9999 * miss <= row.error <= 1.011 * miss
    assert row.measure == "relative L2"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_no_quantizer_holds_are_kept_to_the_bit(dtype: str) -> None:
    x = table(50, 24)
    x[3, 7] = np.nan
    x[9, 0] = np.inf
    x[11, 23] = -np.inf
    x[20] = 0
    x[21] = -0.0
    t = as_library(x, "torch", dtype)
    odd = [3, 9, 11]
    if dtype == "float64":
        t[30] = t[30] * 1e-300  # float32 has no such numbers
        t[31] = 1e300
        odd += [30, 31]
    elif dtype != "float16":
        t[30] *= 1e-40  # nor steps between such
        t[31, ::2], t[31, 1::2] = 3e38, -3e38  # the range overflows
        odd += [30, 31]
    for width in (2, 4, 8):
        ckpt = save(t, None, cfg(width))
        got = through_bytes(ckpt)["emb"]
        for row in odd:
            assert bits_of(got[row]) == bits_of(t[row]), row
        assert (got[20:22] == 0).all()
        assert save(t, ckpt, cfg(width)).nbytes < ckpt.nbytes / 2
    # A constant row is its minimum.
    t = as_library(np.full((50, 24), 1.5, np.float32), "torch", dtype)
    assert bits_of(through_bytes(save(t, None, cfg(2)))["emb"]) == bits_of(t)


@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize(("dtype", "size"), [("float64", 1e-200), ("float32", 1.5e-45)])
def test_tiny_rows_after_rows_of_zeros_are_kept_to_the_bit(dtype: str, size: float, width: int) -> None:
    """A row that its quantizer loses has the record of zeros, and has changed all the same."""
    x = np.zeros((64, 32), dtype)
    cfg, kinds = sp.Config([("embedding", sp.Rows(width))]), {"emb.weight": "embedding"}
    base = sp.compress({"emb.weight": x}, cfg=cfg, kinds=kinds)
    moved = x.copy()
    moved[5:9, ::2] = size
    delta = sp.compress({"emb.weight": moved}, base, cfg, kinds=kinds)
    assert np.array_equal(sp.decompress(delta)["emb.weight"], moved)


def test_sizes() -> None:
    """64 columns: codes, and 64 bits of numbers a row; the coder of this project takes less."""
    x = table(2000, 64)
    for width in (2, 3, 4, 8):
        (published,) = save(x, None, cfg(width, coder="published")).summary()
        (smallest,) = save(x, None, cfg(width)).summary()
        assert published.bits_per_element == pytest.approx(width + 1, abs=0.01)
        assert smallest.bits_per_element < published.bits_per_element - 0.1


def test_the_order_of_the_quantizers() -> None:
    """Figure 9: symmetric, asymmetric, adaptive from worst to best on skewed rows."""
    x = np.exp(0.7 * np.random.default_rng(0).standard_normal((300, 64))).astype(np.float32)
    for width in (2, 3, 4):
        error = {}
        for method in ("symmetric", "asymmetric", "adaptive", "kmeans"):
            (row,) = save(x, None, cfg(width, method)).summary()
            error[method] = row.error
        assert error["symmetric"] > error["asymmetric"] > error["adaptive"]
        assert error["kmeans"] < error["asymmetric"]


# ------------------------------------------------------------------ deltas


edits = st.lists(
    st.lists(st.tuples(st.integers(0, 69), st.sampled_from(["nudge", "new", "nan", "zero", "back"])), max_size=12),
    min_size=1,
    max_size=4,
)


@given(
    steps=edits,
    width=st.sampled_from([None, 2, 4, 8]),
    method=st.sampled_from(["adaptive", "symmetric", "kmeans"]),
    coder=st.sampled_from(["smallest", "published"]),
    dtype=st.sampled_from(DTYPES),
    linear=st.booleans(),
    marks=st.booleans(),
    chunk=st.sampled_from([1 << 22, 7 * 40]),
)
@settings(max_examples=30)
def test_a_chain_holds_each_row_as_last_stored(
    steps: Any, width: int | None, method: str, coder: str, dtype: str, linear: bool, marks: bool, chunk: int
) -> None:
    first = as_library(table(70, 40), "torch", dtype)
    config = cfg(width, method, num_bins=10, ratio=0.5, coder=coder)
    x, rng = first.clone(), torch.Generator().manual_seed(0)
    with small_chunks(chunk):
        base = prev = save(x, None, config)
        since: set[int] = set()
        for step in steps:
            if linear:
                since = set()
            for row, how in step:
                since.add(row)
                noise = torch.randn(40, generator=rng, dtype=torch.float64)
                if how == "nudge":
                    x[row] = (x[row].double() + 1e-3 * noise).to(x.dtype)
                elif how == "new":
                    x[row] = noise.to(x.dtype)
                elif how == "nan":
                    x[row, 5] = torch.nan
                elif how == "zero":
                    x[row] = 0
                else:
                    x[row] = first[row]
            touched = packed(70, sorted(since)) if marks else None
            parent = prev if linear else base
            ckpt = save(x, parent, config, touched)
            assert stored_rows(ckpt) <= len(since)
            got, was = through_bytes(ckpt, parent)["emb"], sp.decompress(parent)["emb"]
            alone = through_bytes(save(x, None, config))["emb"]
            for row in range(70):
                kept = bits_of(got[row]) == bits_of(was[row])
                assert kept or (row in since and bits_of(got[row]) == bits_of(alone[row])), row
                # Rows that are not stored have errors no larger than stored ones.
                assert not kept or bits_of(got[row]) == bits_of(alone[row]), row
            # The parent from its bytes leads to the same file, and so does any number of threads.
            again = parent if linear else sp.Checkpoint.from_bytes(base.to_bytes())
            with threads(1):
                assert save(x, again, config, touched).to_bytes() == ckpt.to_bytes()
            resolved = sp.Checkpoint.from_bytes(ckpt.to_bytes(), parent)
            same_memory(resolved, ckpt)
            prev = resolved


def memory(ckpt: sp.Checkpoint) -> RowsReference:
    (record,) = ckpt.records
    found = ckpt.reference_of(record)
    assert isinstance(found, RowsReference)
    return found


def same_memory(a: sp.Checkpoint, b: sp.Checkpoint) -> None:
    mine, other = memory(a), memory(b)
    assert mine.table == other.table
    assert mine.style.tobytes() == other.style.tobytes()
    assert [r.tobytes() for r in mine.records] == [r.tobytes() for r in other.records]


def test_only_changed_rows_are_stored_and_a_restored_run_stores_none() -> None:
    x = table(500, 64)
    for width in (2, 3, 4, 8, None):
        config = cfg(width)
        base = save(x, None, config)
        assert stored_rows(base) == 500
        assert stored_rows(save(x, base, config)) == 0
        y = x.copy()
        y[[3, 77, 400]] *= 1.5
        delta = save(y, base, config)
        assert stored_rows(delta) == 3
        # Continues from the restored values. Some of them quantize differently.
        restored = sp.decompress(delta)["emb"]
        after = save(restored, delta, config)
        assert stored_rows(after) == 0
        assert bits_of(through_bytes(after, delta)["emb"]) == bits_of(restored)


def test_a_nudge_within_a_step_is_no_change() -> None:
    x = table(100, 64)
    config = cfg(2, "asymmetric")
    base = save(x, None, config)
    y = x.copy()
    inner = np.argsort(x, axis=1)[:, 30]
    y[np.arange(100), inner] *= np.float32(1 + 1e-6)
    assert stored_rows(save(y, base, config)) < 5


@pytest.mark.parametrize("width", [2, 4, 8, None])
def test_a_row_that_moved_without_a_mark_is_stored_and_named(width: int | None) -> None:
    """A changed row without a mark is stored and counted in the note."""
    x = table(3000, 16)
    config = cfg(width)
    base = save(x, None, config)
    y = x.copy()
    y[30:36] += 1
    right = save(y, base, config)
    full = save(y, base, config, packed(3000, range(30, 36)))
    assert full.to_bytes() == right.to_bytes()
    assert (stored_rows(full), full.summary()[0].note) == (6, "")
    # No row that is marked needs to have moved.
    assert save(y, base, config, packed(3000, range(25, 40))).to_bytes() == right.to_bytes()
    for parent in (base, sp.Checkpoint.from_bytes(base.to_bytes())):
        some = save(y, parent, config, packed(3000, range(25, 34)))
        assert stored_rows(some) == 6
        assert some.summary()[0].note == "2 rows changed that were not marked as touched; they are stored, too"
        assert bits_of(through_bytes(some, base)["emb"]) == bits_of(through_bytes(right, base)["emb"])
    # Over a base, marks since the base count.
    last, since = packed(3000, range(25, 34)), packed(3000, range(25, 36))
    assert save(y, base, config, last, since).to_bytes() == right.to_bytes()
    delta = save(x, base, config)
    assert save(y, delta, config, last, since).summary()[0].note[:6] == "2 rows"


def test_a_chain_with_too_few_marks_is_the_chain_of_all_rows() -> None:
    """A chain with a third of the marks equals one that compares all rows."""
    rng = np.random.default_rng(3)
    x = table(5000, 16)
    some = every = save(x, None, cfg(4))
    # If all rows are stored again because of their width, the note is empty.
    for bits, note in ((4, "40 rows"), (4, "40 rows"), (8, ""), (8, "40 rows")):
        at = rng.choice(5000, 60, replace=False)
        x = x.copy()
        x[at] += rng.standard_normal((60, 16)).astype("f4")
        some, every = save(x, some, cfg(bits), packed(5000, at[::3])), save(x, every, cfg(bits))
        same_memory(some, every)
        assert some.summary()[0].note[:7] == note


def test_marks_that_cannot_be_right_are_not_believed() -> None:
    """Marks are not used if weight decay moves all rows."""
    x = table(3000, 16)
    config = cfg(4)
    base = save(x, None, config)
    ckpt = save(x * np.float32(0.9), base, config, packed(3000, [1]))
    assert "not marked" in ckpt.summary()[0].note
    assert stored_rows(ckpt) > 2900
    assert ckpt.summary()[0].error == pytest.approx(base.summary()[0].error, rel=0.05)


def test_fingerprints_tell_rows_apart() -> None:
    """Fingerprints of rows differ for every changed bit, swapped values and cancelling changes."""
    x = np.random.default_rng(0).standard_normal((1, 16)).astype("f4")
    rows = [x]
    for bit in range(512):
        flipped = x.copy()
        flipped.view("u4")[0, bit // 32] ^= np.uint32(1 << bit % 32)
        rows.append(flipped)
    for i in range(16):
        for j in range(i):
            signs, swapped, moved = x.copy(), x.copy(), x.copy()
            signs[0, [i, j]] *= -1
            swapped[0, [i, j]] = x[0, [j, i]]
            moved.view("i4")[0, [i, j]] += np.array([1, -1], "i4")
            rows += [signs, swapped, moved]
    many = np.concatenate(rows)
    prints = codec.fingerprints(many)
    assert len(set(prints.tolist())) == len(many)
    for columns in (16, 15):
        for dtype in ("float16", "float32", "float64"):
            narrow = np.nan_to_num(many[:, :columns]).clip(-9, 9).astype(dtype)
            whole = codec.fingerprints(narrow)
            np.testing.assert_array_equal(codec.fingerprints(torch.from_numpy(narrow)), whole)
            np.testing.assert_array_equal(codec.fingerprints(narrow[7:9]), whole[7:9])
    halves = torch.from_numpy(many).bfloat16()
    np.testing.assert_array_equal(codec.fingerprints(halves), codec.fingerprints(halves.view(torch.int16).numpy()))
    assert codec.fingerprints(many[:0]).size == 0
    # As it is done on a GPU.
    words = torch.from_numpy(many).view(torch.int64)
    np.testing.assert_array_equal(codec._stirred(words * torch.from_numpy(codec._factors(8))).sum(1).numpy(), prints)


def test_marks_of_another_size_are_refused() -> None:
    x = table(100, 16)
    for bits in (np.zeros(12, np.uint8), np.zeros(14, np.uint8), np.full(13, 255, np.uint8)):
        for prev in (None, save(x, None, cfg(4))):
            with pytest.raises(sp.BadArgumentError, match=r"emb.*100 rows.*resized"):
                save(x, prev, cfg(4), bits)
    for bad in ([1, 2], np.zeros(13), np.zeros((13, 1), np.uint8), torch.zeros(13, dtype=torch.uint8)):
        with pytest.raises(sp.BadArgumentError, match="rows"):
            sp.Kind("embedding", rows=bad)


def test_marks_are_no_part_of_what_an_array_is() -> None:
    a, b = sp.Kind("embedding", rows=np.zeros(3, np.uint8)), sp.Kind("embedding")
    assert a == b
    assert hash(a) == hash(b)
    assert repr(a) == repr(b)


def test_marks_of_a_name_that_two_arrays_share_are_not_used() -> None:
    """Marks are not used for a name that weights and their average share."""
    x, average = table(300, 16), table(300, 16, seed=1)
    kinds = {"emb": sp.Kind("embedding", rows=packed(300, [1]))}
    base = sp.compress({"model": {"emb": x}, "ema": {"emb": average}}, cfg=cfg(4), kinds=kinds)
    y = average.copy()
    y[200] += 1
    delta = sp.compress({"model": {"emb": x}, "ema": {"emb": y}}, base, cfg(4), kinds=kinds)
    got = through_bytes(delta, base)["ema"]["emb"]
    assert np.linalg.norm(got[200] - y[200]) < 0.1 * np.linalg.norm(y[200])
    assert delta.summary()[1].note == ""


def test_a_table_that_was_resized_or_retyped_is_stored_in_full() -> None:
    x = table(100, 16)
    base = save(x, None, cfg(4))
    for y in (table(120, 16), table(100, 20), x.astype("f8"), torch.from_numpy(x).bfloat16()):
        ckpt = save(y, base, cfg(4))
        assert stored_rows(ckpt) == y.shape[0]
        assert bits_of(through_bytes(ckpt, base)["emb"]) == bits_of(through_bytes(save(y, None, cfg(4)))["emb"])


def test_over_a_parent_of_another_codec() -> None:
    """A parent array of another codec counts as missing, in both directions."""
    x = table(100, 32)
    for other in (sp.Config([("embedding", sp.Exact())]), sp.Config()):
        base = save(x, None, other)
        delta = save(x, base, cfg(4))
        assert delta.is_delta
        assert stored_rows(delta) == 100
        assert difference(through_bytes(delta, base), sp.decompress(delta)) == ""
        third = save(x, delta, other)
        assert difference(through_bytes(third, delta), sp.decompress(third)) == ""


# ------------------------------------------------------------------ widths


def test_more_restores_than_expected_fall_back_to_eight_bits() -> None:
    assert [codec.width_for(n) for n in (0, 1, 1.5, 3, 3.2, 20, 21)] == [2, 2, 3, 3, 4, 4, 8]
    config = sp.presets.check_n_run("auto", expected_restores=3)
    assert config.for_restores(3) == config
    later = config.for_restores(4)
    assert [r.codec.width for r in later.rules if isinstance(r.codec, sp.Rows)] == [8, None, None, None]
    assert later.chain == config.chain
    assert sp.Config().for_restores(100) == sp.Config()
    assert sp.presets.check_n_run(2).for_restores(100) == sp.presets.check_n_run(2)
    assert sp.presets.check_n_run(2, 1, method="kmeans").for_restores(2).rules[0].codec.width == 8  # type: ignore[attr-defined]
    for bad in (-1, 1.0, True, None):
        with pytest.raises(sp.BadArgumentError, match="restores"):
            config.for_restores(bad)  # type: ignore[arg-type]


def test_a_wider_delta_leaves_no_row_that_changed_at_the_old_width() -> None:
    """A wider delta keeps rows equal to the narrow parent and stores changed rows at its width."""
    x = table(400, 64)
    base = save(x, None, cfg(2))
    restored = sp.decompress(base)["emb"]
    y = restored.copy()
    y[100:150] = x[100:150]
    for marked in (None, packed(400, range(100, 120))):
        delta = save(y, base, cfg(8), marked)
        assert stored_rows(delta) == 50
        got = through_bytes(delta, base)["emb"]
        assert bits_of(got[:100]) == bits_of(restored[:100])
        miss = np.linalg.norm(got[100:150] - x[100:150]) / np.linalg.norm(x[100:150])
        assert miss < 0.01
    # A narrower delta does not store again rows that have more bits.
    fine = save(x, None, cfg(8))
    assert stored_rows(save(x, fine, cfg(2))) == 0


def test_expected_failures() -> None:
    assert sp.presets.expected_failures(0.0, nodes=16, duration=100) == 0
    assert sp.presets.expected_failures(0.001, nodes=16, duration=100) == 2
    for args in ((1.1, 1, 1), (-0.1, 1, 1), (0.1, 0, 1), (0.1, 1.5, 1), (0.1, 1, -1), (0.1, 1, float("nan"))):
        with pytest.raises(sp.BadArgumentError):
            sp.presets.expected_failures(*args)  # type: ignore[arg-type]


def test_an_error_target_widens() -> None:
    x = table(300, 64)
    for target, width in ((0.5, 2), (0.12, 4), (0.01, 8)):
        ckpt = save(x, None, sp.Config([("embedding", sp.Rows(2))], max_rel_error=target))
        (row,) = ckpt.summary()
        assert row.error <= target
        assert {s.bits for s in memory(ckpt).table} == {width}
    ckpt = save(x, None, sp.Config([("embedding", sp.Rows(2))], max_rel_error=1e-4))
    assert ckpt.summary()[0].measure == "exact"
    assert "8 bits miss 0.0001" in ckpt.summary()[0].note
    assert bits_of(through_bytes(ckpt)["emb"]) == bits_of(x)


# ------------------------------------------------------------------ parameters of the search


def test_the_search_is_tuned_on_a_sample() -> None:
    x = np.random.default_rng(0).standard_normal((1000, 64)).astype("f4")
    few, some, many = (search_parameters([x], width)[0] for width in (2, 3, 4))
    assert few <= 25
    assert few <= some <= many
    assert 35 <= many <= 60
    # The paper's 0.001 % of the rows, and no fewer than 256.
    assert sample_sizes([3 * 10**8, 10**8]) == pytest.approx([3000, 1000], abs=1)
    assert (sample_sizes([1000]), sample_sizes([100])) == ([256], [100])
    assert search_parameters([x], 4, num_bins=10, ratio=0.3) == (10, 0.3)
    assert search_parameters([x], 4, num_bins=10)[0] == 10
    hopeless = np.array([[np.nan, 1], [np.inf, 1], [3e38, -3e38]], np.float32)
    assert search_parameters([hopeless, np.zeros((0, 5), "f4")], 3) == (25, 1.0)
    # What a finer search brings beyond is little.
    best, picked = (row_dequantize(*row_quantize(x, 4, num_bins=n, ratio=r)) - x for n, r in ((60, 1.0), (many, 1.0)))
    assert np.linalg.norm(picked, axis=1).mean() < 1.01 * np.linalg.norm(best, axis=1).mean()


def test_a_chain_keeps_the_parameters_of_its_parent() -> None:
    x = table(600, 64)
    config = cfg(4)
    base = save(x, None, config)
    (style,) = memory(base).table
    assert style.num_bins > 0
    # Asked for another search, rows that did not change are still found so by their own.
    assert stored_rows(save(x, base, cfg(4, num_bins=7, ratio=0.5))) == 0
    other = np.random.default_rng(5).uniform(size=x.shape).astype("f4")
    assert memory(save(other, base, config)).table == (style,)
    assert memory(save(other, base, cfg(4, num_bins=7, ratio=0.5))).table == (Style("adaptive", 4, 7, 0.5),)


# ------------------------------------------------------------------ arrays that are not tables


def test_what_has_no_rows_is_exact() -> None:
    config = sp.presets.check_n_run(4)
    rng = np.random.default_rng(0)
    state = {
        "emb": torch.from_numpy(table(100, 32)),
        "cube": torch.from_numpy(rng.standard_normal((20, 10, 10)).astype("f4")),
        "flat": torch.from_numpy(rng.standard_normal(3000).astype("f4")),
        "fc.weight": torch.from_numpy(rng.standard_normal((64, 64)).astype("f4")),
        "narrow": torch.from_numpy(rng.standard_normal((2000, 2)).astype("f4")),
        "ids": torch.arange(2000).reshape(100, 20),
    }
    kinds = dict.fromkeys(("emb", "cube", "flat", "narrow", "ids"), "embedding")
    ckpt = sp.compress(state, cfg=config, kinds=kinds)
    rows = {r.path: r for r in ckpt.summary()}
    assert rows["emb"].stream == "rows"
    assert rows["cube"].note == "exact: 3 dimensions, no rows to quantize"
    assert rows["flat"].note == "exact: 1 dimensions, no rows to quantize"
    assert rows["narrow"].note == "exact: rows this short are not smaller quantized"
    got = through_bytes(ckpt)
    for name in state:
        assert (bits_of(got[name]) == bits_of(state[name])) == (name != "emb")
    moved = {**state, "narrow": state["narrow"].clone()}
    moved["narrow"][5] = 9
    delta = sp.compress(moved, ckpt, config, kinds=kinds)
    assert difference({**through_bytes(delta, ckpt), "emb": 0}, {**moved, "emb": 0}) == ""
    assert {r.path: r for r in delta.summary()}["narrow"].stored_bytes < 300


def test_a_table_that_is_not_known_for_one_says_so() -> None:
    """Without kinds an embedding is recognised by its name only; the reason names it."""
    config = sp.presets.check_n_run(4)
    state = {
        "user_table.weight": table(300, 32),
        "table.weight": torch.from_numpy(table(300, 32, 1)),
        "emb.weight": table(300, 32, 2),
        "wide.weight": table(32, 300, 3),
        "small.weight": table(20, 4),
        "table.bias": table(1, 300)[0],
        "ids": np.arange(3000).reshape(300, 10),
    }
    why = "exact: not known for an embedding, by its name or by kinds"
    base = sp.compress(state, cfg=config)
    for ckpt in (base, sp.compress(state, base, config)):
        assert {r.path: r.note for r in ckpt.summary() if r.note} == {"user_table.weight": why, "table.weight": why}
    known = sp.compress(state, cfg=config, kinds={"user_table.weight": "embedding", "table.weight": "linear"})
    assert {r.path: (r.stream, r.note) for r in known.summary()}["user_table.weight"] == ("rows", "")
    assert not any(r.note for r in known.summary())
    assert not any(r.note for r in sp.compress(state, cfg=sp.presets.lossless()).summary())


def test_optimizer_state_follows_its_rows() -> None:
    """Optimizer state of a table is exact by default and stored for changed rows only."""
    rows, columns = 300, 32
    weight = torch.from_numpy(table(rows, columns))
    rng = torch.Generator().manual_seed(0)

    def state(changed: list[int], x: torch.Tensor) -> dict[str, Any]:
        sums = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1))
        per_row = torch.rand(rows, generator=torch.Generator().manual_seed(2))
        dense = torch.rand(64, 64, generator=rng)
        sums[changed] += 1
        per_row[changed] += 1
        entries = {
            0: {
                "step": torch.tensor(1.0),
                "sum": sums,
                "momentum": per_row,
                "exp_avg": sums * 2,
                "exp_avg_sq": sums * 3,
            },
            1: {"sum": dense, "exp_avg": dense * 2, "exp_avg_sq": dense + 1},
        }
        return {"model": {"emb.weight": x}, "optimizer": {"state": entries}}

    kinds: dict[str, Any] = {"emb.weight": "embedding"}
    roles = {"sum": "state", "momentum": "first moment", "exp_avg": "first moment", "exp_avg_sq": "second moment"}
    for number, layer in ((0, "embedding"), (1, "linear")):
        for entry, role in roles.items():
            kinds[f"state/{number}/{entry}"] = sp.Kind(layer, role)
    config = sp.presets.check_n_run(4)
    before, after = state([], weight), state([7, 200], weight)
    base = sp.compress(before, cfg=config, kinds=kinds)
    delta = sp.compress(after, base, config, kinds=kinds)
    assert difference(through_bytes(base)["optimizer"], before["optimizer"]) == ""
    assert difference(through_bytes(delta, base)["optimizer"], after["optimizer"]) == ""
    found = {r.path.removeprefix("optimizer/state/"): r for r in delta.summary()}
    for entry in roles:
        assert found[f"0/{entry}"].codec == "rows"
        assert found[f"0/{entry}"].stored_bytes < 2 * columns * 4 + 90
        assert found[f"0/{entry}"].measure == "exact"
    assert {found[f"1/{e}"].stream for e in ("sum", "exp_avg", "exp_avg_sq")} == {"bytes"}
    # Moments of the table's shape are quantized on request; unknown entries are not.
    lossy = sp.compress(before, cfg=sp.presets.check_n_run(4, moment_bits=8), kinds=kinds)
    found = {r.path.removeprefix("optimizer/state/"): r for r in lossy.summary()}
    assert [found[f"0/{e}"].measure for e in ("sum", "momentum", "exp_avg", "exp_avg_sq")] == [
        "exact",
        "exact",
        "relative L2",
        "relative L2",
    ]


def test_the_preset_is_the_paper() -> None:
    config = sp.presets.check_n_run()
    assert config.chain == sp.ChainPolicy(None, "base", predictor="size", only_smaller=False)
    assert sp.presets.check_n_run(policy="one_shot").chain == sp.ChainPolicy(None, "base", only_smaller=False)
    assert sp.presets.check_n_run(policy="consecutive").chain == sp.ChainPolicy(None, only_smaller=False)
    for bad in ({"policy": "always"}, {"bits": 5}, {"bits": None}, {"bits": "auto"}, {"method": "best"}, {"ratio": 0}):
        with pytest.raises(sp.BadArgumentError):
            sp.presets.check_n_run(**bad)  # type: ignore[arg-type]
    again = sp.Config.from_json(json.loads(json.dumps(sp.presets.check_n_run("auto", 2.5).to_json())))
    assert again == sp.presets.check_n_run("auto", 2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("bits", v) for v in (0, 1, 5, 16, 4.0, True, "4")],
        *[("num_bins", v) for v in (0, 4097, 25.0, True)],
        *[("ratio", v) for v in (0, 1.1, float("nan"), "1")],
        *[("expected_restores", v) for v in (-1, float("nan"), float("inf"), "3", True)],
        *[("max_error", v) for v in (0, 1, "x")],
        ("method", "raw"),
        ("coder", "huffman"),
        ("bits", "auto"),
    ],
)
def test_values_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=field):
        sp.Rows(**{field: value})


# ------------------------------------------------------------------ references, rebased checkpoints, and hostile bytes


def chain(width: Any = 4, method: str = "adaptive") -> list[sp.Checkpoint]:
    x = table(120, 24)
    made = [save(x, None, cfg(width, method))]
    for t in (1, 2, 3):
        x = x.copy()
        x[t * 10 : t * 10 + 15] += np.float32(0.3 * t)
        x[t, 0] = np.nan
        made.append(save(x, made[-1], cfg(8 if t == 3 else width, method)))
    return made


@pytest.mark.parametrize(("width", "method"), [(4, "adaptive"), (2, "symmetric"), (2, "kmeans"), (None, "adaptive")])
def test_a_memory_stated_anew_is_the_same_memory(width: Any, method: str) -> None:
    made = chain(width, method)
    spec = made[0].records[0].spec
    sizes = {}
    for i, new in enumerate(made):
        for j, old in enumerate([None, *made]):
            parent = None if old is None else memory(old)
            meta, pieces = codec.rebase_rows((spec,), (memory(new),), (parent,))
            sizes[i, j] = sum(map(len, pieces))
            meta = json.loads(json.dumps(meta))
            (back,) = codec.decode_rows(Coded((spec,), meta, [memoryview(p) for p in pieces], (parent,)))
            mine = memory(new)
            assert (back.table, back.style.tobytes()) == (mine.table, mine.style.tobytes())
            assert [r.tobytes() for r in back.records] == [r.tobytes() for r in mine.records]
    assert sizes[3, 1] < sizes[3, 0]
    assert sizes[3, 4] < 20
    with pytest.raises(sp.BadArgumentError):
        codec.rebase_rows((spec,), (sp.Checkpoint.from_bytes(made[0].to_bytes()),), (None,))  # type: ignore[arg-type]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_memories_are_put_together_row_by_row(seed: int) -> None:
    """`replaced`, `take`, `split`, `joined` and `same_records` against a list of rows."""
    rng = np.random.default_rng(seed)
    spec = LeafSpec("numpy", "float32", (40, 12))
    styles = [RAW, Style("asymmetric", 4), Style("symmetric", 2), Style("adaptive", 3, 5, 1.0)]
    first = table(40, 12, seed % 50)
    current = codec._kept(first, spec, styles[0], quantized(first, spec, styles[0]))
    expected = list(current.decoded(spec))
    for _ in range(4):
        at = np.flatnonzero(rng.random(40) < 0.4)
        rows, style = rng.standard_normal((at.size, 12)).astype("f4"), styles[rng.integers(4)]
        new = codec._kept(rows, spec, style, quantized(rows, spec, style))
        for row, value in zip(
            at, new.decoded(dataclasses.replace(spec, shape=(at.size, 12))) if at.size else [], strict=True
        ):
            expected[row] = value
        before, current = current, replaced(current, at, new)
        same = same_records(before, current)
        assert same[~np.isin(np.arange(40), at)].all()
    np.testing.assert_array_equal(current.decoded(spec), expected)
    step = int(rng.integers(1, 50))
    together = joined(current.split(step))
    np.testing.assert_array_equal(together.decoded(spec), expected)
    assert {together.table[k] for k in together.style} == set(together.table)
    rows = np.flatnonzero(rng.random(40) < 0.5)
    if rows.size:
        part = together.take(rows).decoded(dataclasses.replace(spec, shape=(rows.size, 12)))
        np.testing.assert_array_equal(part, np.array(expected)[rows])


def test_records_hold_what_the_kernels_gave() -> None:
    x = table(30, 21)
    spec, _ = read_leaf(x, "x")
    for style in (Style("asymmetric", 3), Style("symmetric", 4), Style("kmeans", 2), Style("adaptive", 2, 9, 0.4)):
        records, lost = quantized(x, spec, style)
        assert not lost.any()
        assert records.shape == (30, style.length(21, 4))
        if style.method == "kmeans":
            want = row_lookup(*row_kmeans(x, 2))
        else:
            search = {"num_bins": 9, "ratio": 0.4} if style.method == "adaptive" else {}
            want = row_dequantize(*row_quantize(x, style.bits, style.method, **search))  # type: ignore[arg-type]
        np.testing.assert_array_equal(dequantized(records, style, 21), want)


def test_damaged_pieces_are_refused_or_decode_to_something() -> None:
    """Damage with valid checksums gives a typed error or rows, never another error."""
    rng = random.Random(fresh_seed())
    spec = LeafSpec("numpy", "float32", (120, 24))
    cases = []
    for width, method in ((4, "adaptive"), (2, "kmeans"), (None, "adaptive"), (8, "symmetric")):
        made = chain(width, method)
        for prev, ckpt in zip([None, *made], made, strict=False):
            (record,) = ckpt.records
            _, chunks = take_apart(ckpt.to_bytes())
            cases.append((record.meta, b"".join(chunks), None if prev is None else memory(prev)))
    refused = 0
    for _ in range(1500):
        meta, piece, parent = rng.choice(cases)
        bad = bytearray(piece)
        for _ in range(rng.choice([1, 1, 2, 5])):
            how, at = rng.randrange(4), rng.randrange(min(len(bad), 60) if rng.random() < 0.7 else len(bad))
            if how == 0:
                bad[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                bad[at] = rng.randrange(256)
            elif how == 2:
                del bad[at:]
            else:
                bad[at:at] = rng.randbytes(3)
            if not bad:
                break
        parent = parent if rng.random() < 0.9 else None
        try:
            (got,) = codec.decode_rows(Coded((spec,), meta, [memoryview(bytes(bad))], (parent,)))
            assert got.values(spec).shape == (120 * 24,)
        except sp.CorruptDataError:
            refused += 1
    assert refused > 300


GOOD = ["asymmetric", 4, 0, 0.0]
HOSTILE: dict[str, Any] = {
    "none": None,
    "empty": [],
    "no list": {"s": 1},
    "many": [GOOD] * 300,
    "twice": [GOOD, GOOD],
    "descending": [["symmetric", 4, 0, 0.0], GOOD],
    "method": [["best", 4, 0, 0.0]],
    "method a list": [[["raw"], 4, 0, 0.0]],
    "bits": [["asymmetric", 5, 0, 0.0]],
    "bits huge": [["asymmetric", 1 << 70, 0, 0.0]],
    "bits negative": [["asymmetric", -4, 0, 0.0]],
    "bits bool": [["asymmetric", True, 0, 0.0]],
    "raw with bits": [["raw", 4, 0, 0.0]],
    "raw with bins": [["raw", 0, 5, 0.0]],
    "no bins": [["adaptive", 4, 0, 1.0]],
    "bins huge": [["adaptive", 4, 1 << 40, 1.0]],
    "no ratio": [["adaptive", 4, 5, 0.0]],
    "ratio": [["adaptive", 4, 5, 1.5]],
    "ratio text": [["adaptive", 4, 5, "1"]],
    "ratio NaN": [["adaptive", 4, 5, float("nan")]],
    "bins of another": [["asymmetric", 4, 5, 1.0]],
    "codebooks larger than rows": [["kmeans", 8, 0, 0.0]],
    "short": [["raw", 0]],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_of_styles(name: str) -> None:
    header, chunks = take_apart(chain()[0].to_bytes())
    header["groups"][0]["m"] = {"s": HOSTILE[name]}
    blob = put_together(json.dumps(header).replace("NaN", "1e999").encode(), chunks)
    with pytest.raises(sp.CorruptDataError):
        sp.decompress(sp.Checkpoint.from_bytes(blob))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0, 5), "float32"), ((5, 0), "float32"), ((), "float32"), ((60, 48), "int32"), ((2880,), "bool")],
)
def test_hostile_shapes(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(sp.CorruptDataError):
        codec.decode_rows(Coded((LeafSpec("numpy", dtype, shape),), {"s": [GOOD]}, [memoryview(b"")], (None,)))
    huge = LeafSpec("numpy", "float32", (1 << 46, 1 << 1))
    with pytest.raises(sp.CorruptDataError):
        codec.decode_rows(Coded((huge,), {"s": [["raw", 0, 0, 0.0]]}, [memoryview(b"")], (None,)))


def test_chunks_change_nothing_but_the_pieces() -> None:
    x = table(333, 40)
    y = x.copy()
    y[::7] += 1
    for config in (cfg(4), cfg(3, "kmeans"), cfg(None)):
        base = save(x, None, config)
        whole = sp.decompress(save(y, base, config))
        with small_chunks(1 << 10):
            first = save(x, None, config)
            ckpt = save(y, first, config)
            assert len(ckpt.records[0].group.lengths) == -(-333 // 25)
            assert difference(through_bytes(ckpt, first), whole) == ""
