"""The HTML file of a report, which loads no other file.

Paths, tags and notes are data and are always escaped.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..codec.display import printable, size
from . import charts
from .collect import BINS, MAX_NOTES, MAX_STEPS, MAX_TENSORS, Choice, Run, Tensor

_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
"""A number in a note."""
LONGEST = 300
"""Maximum number of characters of a name that are shown."""


def _variables(colours: Mapping[str, str]) -> str:
    """Return colours as variables of a style sheet."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_DARK = {"ink": "#e3e6ea", "faint": "#7b8592", "grid": "#343a43", "red": "#ff6b7d", "note": "#a3acb8", "bar": "#3f6f91"}
_LIGHT = {**charts.VARIABLES, "note": "#5d6675", "bar": "#9cc3dd"}
_STYLE = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} body {{ background: #16191e; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: var(--ink); }}
body {{ max-width: 1000px; margin: 1.5em auto; padding: 0 1em; }}
h1 {{ font-size: 1.5em; overflow-wrap: anywhere; }} h2 {{ font-size: 1.15em; margin-top: 2em; }}
.result {{ font-size: 1.15em; }}
svg {{ width: 100%; height: auto; }} svg.chart {{ max-width: 640px; }}
table {{ border-collapse: collapse; font-size: 0.92em; }}
th, td {{ padding: 2px 10px 2px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
th {{ font-weight: 600; }} thead th {{ border-bottom: 1px solid var(--faint); overflow-wrap: normal; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
.note {{ color: var(--note); }} .problem {{ color: var(--red); }}
.scroll {{ max-height: 30em; overflow: auto; }}
@media (max-width: 700px) {{ .scroll td, .scroll th {{ overflow-wrap: normal; white-space: nowrap; }} }}
select {{ max-width: 100%; font: inherit; }}
.bar {{ fill: var(--bar); }} .axis {{ stroke: var(--faint); }}
.entry line {{ stroke: #d55e00; }} .entry circle {{ fill: #d55e00; }}
#histogram text {{ font-size: 12px; fill: var(--ink); }}
"""


def page(run: Run) -> str:
    """Return the HTML page about a run.

    Args:
        run: as `collect` returns it.

    Raises:
        ShrinkpointError: Matplotlib is not installed.
    """
    body = [
        f"<h1>{text(run.name)}</h1>",
        *_summary(run),
        *(f'<p class="problem">Not readable: {text(problem)}</p>' for problem in run.problems),
        *_charts(run),
        *_choices(run),
        *_searches(run),
        *_histograms(run),
        *_steps(run),
    ]
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # In case an escape is forgotten: only this script may run, and nothing may be loaded.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(run.name)} - shrinkpoint report</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            f'<script type="application/json" id="tensors">{data(list(map(_tensor, run.tensors)))}</script>',
            f"<script>{SCRIPT}</script>",
            "</body></html>",
            "",
        ]
    )


def shown(name: object) -> str:
    """A name without control characters, shortened if it is very long."""
    safe = printable(name)
    return safe if len(safe) <= LONGEST else f"{safe[: LONGEST - 30]}...{safe[-27:]}"


def text(name: object) -> str:
    """A name as HTML text, also inside a quoted attribute.

    Example:
        >>> text("<b>&'")
        '&lt;b&gt;&amp;&#x27;'
    """
    return html.escape(shown(name))


def data(value: Any) -> str:
    """JSON for a script element, with "<" escaped so that it cannot end the element.

    Example:
        >>> data(["</script><!--"])
        '["\\\\u003c/script>\\\\u003c!--"]'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls; a column whose name begins with ">" is aligned right."""
    kinds = [' class="n"' if c.startswith(">") else "" for c in columns]
    head = "".join(f"<th{k}>{text(c.removeprefix('>'))}</th>" for k, c in zip(kinds, columns, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{k}>{text(cell)}</td>" for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    ]
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _summary(run: Run) -> list[str]:
    if not run.steps:
        return ["<p>No step can be read.</p>"]
    raw, stored = (sum(getattr(s.manifest, name) for s in run.steps) for name in ("raw_nbytes", "stored_nbytes"))
    deltas = sum(s.manifest.is_delta for s in run.steps)
    worst: dict[tuple[str, str], float] = {}
    for key, error in (item for s in run.steps for item in s.errors.items()):
        worst[key] = max(worst.get(key, 0.0), error.largest)
    errors = ", ".join(f"{role} {most:.2g} ({measure})" for (role, measure), most in worst.items())
    times = f"{raw / stored:.1f} times smaller"
    result = f"{len(run.steps)} checkpoints are {times}: {size(stored)} instead of {size(raw)}."
    facts = [
        f"{run.all_steps} steps, {run.steps[0].step} to {run.steps[-1].step}",
        f"bases: {len(run.steps) - deltas}, deltas: {deltas}",
        f"restores: {run.restores}",
        f"largest errors of an array: {errors}" if errors else "every array is exact",
    ]
    if len(run.steps) + len(run.problems) < run.all_steps:
        facts.append(
            f"{len(run.steps)} of the steps are shown, evenly spaced (at most {MAX_STEPS}); sums are over these"
        )
    return [f'<p class="result">{text(result)}</p>', f"<p>{text('; '.join(facts))}.</p>"]


def _charts(run: Run) -> list[str]:
    if not run.steps:
        return []
    found = [("Size and ratio", charts.sizes(run)), ("Bytes by kind of array", charts.parts(run) + _parts(run))]
    found += [("Error", charts.errors(run)), ("Quality", charts.quality(run))]
    notes = {
        "Bytes by kind of array": "Kinds are guessed from names and shapes.",
        "Error": "As measured when the arrays were stored. Relative L2 is the error of a whole array; relative is the "
        "largest error of any of its elements, which bounds the relative L2 error of the array.",
    }
    absent = {
        "Error": "Every array of every step is exact.",
        "Quality": "No metric is recorded; Store.save(..., metric=) and `shrinkpoint rate` record one.",
    }
    return [
        f"<h2>{title}</h2>"
        + (f'<p class="note">{notes[title]}</p>' if title in notes and svg else "")
        + (svg or f'<p class="note">{absent[title]}</p>')
        for title, svg in found
    ]


def _parts(run: Run) -> str:
    raw: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for step in run.steps:
        raw.update(step.raw_parts)
        stored.update(step.parts)
    total = max(1, sum(stored.values()))
    rows = [
        (
            name,
            size(raw[name]) if raw[name] else "",
            size(stored[name]),
            f"{raw[name] / stored[name]:.2f}" if stored[name] and raw[name] else "",
            f"{100 * stored[name] / total:.1f} %",
        )
        for name in charts.categories(run.steps)
    ]
    return _table(("kind", ">raw", ">stored", ">ratio", ">share of the bytes"), rows)


def _choices(run: Run) -> list[str]:
    arrays: Counter[Choice] = Counter()
    steps: dict[Choice, set[int]] = {}
    notes: dict[Choice, list[str]] = {}
    for step in run.steps:
        for found, count in step.choices.items():
            choice = found._replace(note=_NUMBER.sub("#", found.note))
            arrays[choice] += count
            steps.setdefault(choice, set()).add(step.step)
            notes.setdefault(choice, []).append(found.note)
    most = sorted(arrays.most_common(MAX_NOTES))
    rows = [
        (*choice[:-1], merged(notes[choice]), count, len(steps[choice]), _range(sorted(steps[choice])))
        for choice, count in most
    ]
    left = len(arrays) - len(most)
    columns = ("kind", "codec", "stream", "chosen by", "note", ">arrays", ">steps", "which steps")
    more = [f'<p class="note">{left} rarer choices are omitted (at most {MAX_NOTES} are shown).</p>'] if left else []
    return ["<h2>Choices of the codecs</h2>", _table(columns, rows), *more]


def merged(notes: Sequence[str]) -> str:
    """Merge notes that differ only in numbers to one note with the range of each number.

    Example:
        >>> merged(["1.5 % changed", "20 % changed", "3 % changed"])
        '1.5 to 20 % changed'
    """
    columns = zip(*(_NUMBER.findall(note) for note in notes), strict=True)
    ranges = [sorted(set(column), key=lambda text: float(text.replace(",", ""))) for column in columns]
    shown = iter(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" for found in ranges)
    return _NUMBER.sub(lambda _: next(shown), notes[0])


def _range(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]} to {steps[-1]}"


def _searches(run: Run) -> list[str]:
    out = []
    for path, result in run.searches:
        config = json.dumps(result.config.to_json(), indent=1)
        out += [
            f"<h2>Configuration search: {text(path)}</h2>",
            f"<p>{text(result)}</p>",
            _table(
                (">round", "configuration", ">bytes", ">quality", ">degradation", "passed", "reason"),
                [
                    (
                        t.round,
                        "the state itself" if t.point is None else t.point,
                        t.nbytes or "",
                        "nan" if t.quality is None else f"{t.quality:.6g}",
                        f"{t.degradation:+.3%}",
                        "yes" if t.passed else "no",
                        t.reason,
                    )
                    for t in result.trials
                ],
            ),
            f"<details><summary>Chosen configuration</summary><pre>{html.escape(config)}</pre></details>",
        ]
    return out


def _histograms(run: Run) -> list[str]:
    if not run.tensors:
        return ["<h2>Histograms</h2>", '<p class="note">No float array can be read.</p>']
    capped = ""
    if len(run.tensors) < run.all_tensors:
        capped = f" The largest {len(run.tensors)} of {run.all_tensors} float arrays (at most {MAX_TENSORS})."
    caption = (
        f"Restored values of step {run.tensor_step} in up to {BINS} equal bins; an orange stem is an entry of the "
        f"codebook, and its height the number of its uses.{capped}"
    )
    return [
        "<h2>Histograms</h2>",
        f'<p class="note">{text(caption)}</p>',
        '<p><label>Tensor <select id="tensor"></select></label></p>',
        '<div id="histogram"></div><table><tbody id="facts"></tbody></table>',
        "<noscript><p>The histograms need JavaScript.</p></noscript>",
    ]


def _tensor(tensor: Tensor) -> dict[str, Any]:
    record = tensor.record
    return {
        "path": shown(record.path),
        "kind": tensor.category,
        "dtype": record.spec.dtype,
        "shape": "x".join(map(str, record.spec.shape)) or "()",
        "codec": f"{record.codec}, stream {record.stream}",
        "why": shown(record.why),
        "note": shown(record.note),
        "sizes": f"{size(record.spec.nbytes)}, {size(record.nbytes)}",
        "error": "exact" if record.measure == "exact" else f"{record.error:.3g} ({shown(record.measure)})",
    } | dataclasses.asdict(tensor.histogram)


def _steps(run: Run) -> list[str]:
    restored = Counter(run.restored)
    rows = [
        (
            m.step,
            "delta" if m.is_delta else "base",
            size(m.raw_nbytes),
            size(m.stored_nbytes),
            f"{m.ratio:.2f}",
            f"{m.restore_cost:.2f}",
            "" if m.metric is None else f"{m.metric:g}",
            restored[m.step] or "",
            " ".join(labels),
        )
        for m, labels in ((s.manifest, s.labels) for s in run.steps)
    ]
    columns = (">step", "kind", ">state", ">stored", ">ratio", ">restore cost", ">metric", ">restored", "labels")
    caption = "Restore cost: bytes decoded to restore the step, in multiples of a base."
    return ["<h2>Steps</h2>", f'<p class="note">{caption}</p>', _table(columns, rows)]


SCRIPT = """"use strict";
(function () {
  var data = JSON.parse(document.getElementById("tensors").textContent);
  var choice = document.getElementById("tensor");
  var place = document.getElementById("histogram");
  var facts = document.getElementById("facts");
  var H = 300, L = 60, R = 10, T = 10, B = 60;

  function element(name, attributes, text) {
    var made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.keys(attributes).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    if (text !== undefined) { made.textContent = text; }
    return made;
  }
  function short(x) { return x === 0 ? "0" : Number(x.toPrecision(3)).toString(); }

  function draw(t) {
    var W = Math.max(320, Math.min(960, place.clientWidth || 960));
    var svg = element("svg", {viewBox: "0 0 " + W + " " + H, role: "img"});
    svg.setAttribute("aria-label", "histogram of " + t.path);
    var counts = t.counts, most = Math.max(1, Math.max.apply(null, counts.concat(t.uses)));
    var span = t.high - t.low;
    function x(value) { return L + (span > 0 && isFinite(span) ? (value - t.low) / span : 0.5) * (W - L - R); }
    function y(count) {
      var part = count ? 0.05 + 0.95 * Math.log(count) / Math.log(Math.max(most, 2)) : 0;
      return (H - B) - part * (H - T - B);
    }
    counts.forEach(function (count, i) {
      var width = (W - L - R) / counts.length;
      var bar = element("rect", {x: L + i * width, y: y(count), width: Math.max(0.5, width - 1),
        height: H - B - y(count), "class": "bar"});
      var from = t.low + i * (span / counts.length), to = t.low + (i + 1) * (span / counts.length);
      bar.appendChild(element("title", {}, short(from) + " to " + short(to) + ": " + count));
      svg.appendChild(bar);
    });
    t.codebook.forEach(function (entry, i) {
      var at = Math.min(W - R, Math.max(L, x(entry)));
      var stem = element("g", {"class": "entry"});
      stem.appendChild(element("line", {x1: at, x2: at, y1: y(t.uses[i]), y2: H - B + 8}));
      stem.appendChild(element("circle", {cx: at, cy: y(t.uses[i]), r: 2.5}));
      stem.appendChild(element("title", {}, short(entry) + ": used " + t.uses[i] + " times"));
      svg.appendChild(stem);
    });
    svg.appendChild(element("line", {x1: L, x2: W - R, y1: H - B, y2: H - B, "class": "axis"}));
    var powers = Math.ceil(Math.log10(most) / 4);
    for (var power = 1; power <= most; power *= Math.pow(10, Math.max(1, powers))) {
      svg.appendChild(element("text", {x: L - 6, y: y(power) + 4, "text-anchor": "end"}, String(power)));
    }
    if (counts.length) {
      (W < 600 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).forEach(function (part) {
        if (span > 0 || part === 0.5) {
          svg.appendChild(element("text", {x: x(t.low + part * span), y: H - B + 24,
            "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle"}, short(t.low + part * span)));
        }
      });
    }
    svg.appendChild(element("text", {x: (L + W - R) / 2, y: H - 10, "text-anchor": "middle"},
      "value (height: number of elements, logarithmic)"));
    place.replaceChildren(svg);
    var facts_of = [["path", t.path], ["kind", t.kind], ["dtype, shape", t.dtype + " " + t.shape],
      ["codec", t.codec + (t.note ? " (" + t.note + ")" : "")], ["chosen by", t.why], ["raw, stored", t.sizes],
      ["error", t.error], ["range", counts.length ? short(t.low) + " to " + short(t.high) : "no finite value"],
      ["zero, not finite", t.zeros + ", " + t.odd]];
    if (t.codebook.length) {
      facts_of.push(["codebook", t.codebook.length + " entries; " + t.pruned + " elements pruned, " +
        t.protected + " protected"]);
    }
    var rows = facts_of.map(function (pair) {
      var row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
      head.textContent = pair[0];
      cell.textContent = pair[1];
      row.append(head, cell);
      return row;
    });
    facts.replaceChildren.apply(facts, rows);
  }
  function byAddress() {
    var asked = window.location.hash.match(/^#tensor=(.*)$/), wanted = "";
    if (asked) { try { wanted = decodeURIComponent(asked[1]); } catch (error) { wanted = ""; } }
    var found = data.findIndex(function (t) { return t.path === wanted; });
    choice.selectedIndex = Math.max(0, found);
    draw(data[choice.selectedIndex]);
  }
  if (!data.length) { return; }
  data.forEach(function (t) {
    var option = document.createElement("option");
    option.textContent = t.path;
    choice.appendChild(option);
  });
  choice.addEventListener("change", function () { draw(data[choice.selectedIndex]); });
  window.addEventListener("hashchange", byAddress);
  window.addEventListener("resize", function () { draw(data[choice.selectedIndex]); });
  byAddress();
})();
"""
"""Draws the histogram of the selected tensor.

The tensor is selected by the drop-down, or by "#tensor=PATH" in the address.
"""
