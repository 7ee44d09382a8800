"""The script of the page, which draws the histogram of the selected tensor.

The tensor is selected by the drop-down, or by "#tensor=PATH" in the address.
"""

from __future__ import annotations

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
