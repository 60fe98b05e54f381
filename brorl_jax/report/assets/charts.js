"use strict";
/* Small drawing library: lines over runs, and stacked shares of one run, as inline SVG. No dependencies. */

const SVG = "http://www.w3.org/2000/svg";

/** A character that would be invisible, or reorder what is around it, as a visible mark. */
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g, (c) => {
    const code = c.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** An element; attribute `text` is its text, functions are listeners. All text goes in as text, never as HTML. */
function el(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = visible(value);
    else if (typeof value === "function") node.addEventListener(key, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
const format = {
  number(v) {
    const a = Math.abs(v);
    if (a >= 1e9) return trim((v / 1e9).toFixed(2)) + "G";
    if (a >= 1e6) return trim((v / 1e6).toFixed(2)) + "M";
    if (a >= 1e4) return trim((v / 1e3).toFixed(1)) + "k";
    if (a >= 1e3) return trim((v / 1e3).toFixed(2)) + "k";
    if (a >= 100) return trim(v.toFixed(1));
    if (a >= 0.01 || a === 0) return trim(v.toFixed(a >= 10 ? 2 : 3));
    return v.toExponential(1);
  },
  percent: (v) => trim((100 * v).toFixed(1)) + "%",
  seconds(v) {
    if (v >= 3600) return `${Math.floor(v / 3600)} h ${String(Math.round((v % 3600) / 60)).padStart(2, "0")} min`;
    if (v >= 60) return `${Math.floor(v / 60)} min ${String(Math.round(v % 60)).padStart(2, "0")} s`;
    return trim(v.toFixed(v < 10 ? 2 : 1)) + " s";
  },
};

/** Round tick positions covering [lo, hi]. */
function ticks(lo, hi, count) {
  const raw = (hi - lo) / Math.max(count, 1);
  if (!(raw > 0)) return [lo];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + step * 1e-9; k++) out.push(+(k * step).toPrecision(12));
  return out;
}

/** Exponential moving average without start-up bias; gaps stay gaps. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

const timeUnit = (hi) => (hi > 7200 ? [3600, " h"] : hi > 120 ? [60, " min"] : [1, " s"]);

/** Index of the entry of sorted `xs` nearest to x. */
function nearest(xs, x) {
  let lo = 0, hi = xs.length - 1;
  while (hi - lo > 1) {
    const mid = (lo + hi) >> 1;
    if (xs[mid] < x) lo = mid; else hi = mid;
  }
  return Math.abs(xs[hi] - x) < Math.abs(xs[lo] - x) ? hi : lo;
}

/**
 * A figure with a title and a plot. `spec`: {title, hint, format, bounds?: [lo, hi], clip?: bool, stack?: bool,
 * whole?: bool, of what only whole numbers make sense}.
 * `draw(series, view)` draws series [{name, color, dash, x, y, raw}] with view {axis: {label, time}, weight}.
 */
function chart(spec) {
  const plot = el("div", { class: "plot" });
  const tip = el("div", { class: "tip", hidden: true, "aria-live": "polite" });
  const note = el("p", { class: "note" });
  const legend = el("div", { class: "layers" });
  const node = el("figure", { class: "chart" + (spec.wide ? " wide" : "") },
    el("figcaption", {}, el("h3", { text: spec.title }), el("p", { text: spec.hint })), plot, legend, note);
  plot.append(tip);
  let last = null;
  const draw = (series, view) => {
    last = [series, view];
    node.hidden = false;
    if (plot.clientWidth) paint(plot, tip, note, legend, spec, series, view);
  };
  new ResizeObserver(() => last && draw(...last)).observe(plot);
  return { node, draw, spec };
}

function paint(plot, tip, note, legend, spec, series, view) {
  const width = plot.clientWidth, height = spec.tall ? 260 : 190;
  const live = series.filter((s) => s.x.length);
  plot.querySelector("svg, .empty")?.remove();
  tip.hidden = true;
  note.textContent = "";
  if (!live.length) {
    plot.prepend(el("p", { class: "empty", text: "No data in the runs shown." }));
    legend.replaceChildren();
    return;
  }
  const [y0, y1, cut] = range(spec, live);
  if (cut) note.textContent = `Cut off above ${spec.format(y1)}; the highest value is ${spec.format(cut)}.`;
  const xs = live.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs);
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const yTicks = ticks(y0, y1, 5.5).filter((t) => !spec.whole || Number.isInteger(t));
  const labels = yTicks.map(spec.format);
  const left = 12 + 6.6 * Math.max(...labels.map((t) => t.length)), right = 10, top = 10, bottom = 24;
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const root = el("svg:svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": describe(spec, live, view),
  });
  const clip = `clip-${(paint.count = (paint.count || 0) + 1)}`;
  root.append(el("svg:clipPath", { id: clip }, el("svg:rect", {
    x: left - 4, y: top - 4, width: width - left - right + 8, height: height - top - bottom + 8 })));
  yTicks.forEach((t, i) => root.append(
    el("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }),
    el("svg:text", { class: "tick end", x: left - 7, y: py(t) + 4, text: labels[i] })));
  xTicks(root, view, x0, x1, px, width - left - right, height - 7);
  const body = el("svg:g", { "clip-path": `url(#${clip})` });
  root.append(body);
  (spec.stack ? paintStack : paintLines)(body, live, px, py);
  legend.replaceChildren(...(spec.stack ? live.map((s) => el("span", {}, swatch(s.color), el("span", { text: s.name }))) : []));
  plot.prepend(root);
  hover(plot, root, tip, spec, live, view, { px, py, x0, x1, left, right, top, bottom, width, height });
}

/** The values axis: [low, high, highest value if it was cut off]. */
function range(spec, live) {
  if (spec.bounds) return [...spec.bounds, 0];
  const all = live.flatMap((s) => (spec.stack ? s.top : s.y).filter((v) => v !== null));
  let lo = spec.zero || spec.stack ? 0 : Infinity, hi = -Infinity;
  for (const v of all) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
  let cut = 0;
  if (spec.clip && all.length > 8) {
    const whole = (spec.stack ? live[live.length - 1].top : all).filter((v) => v !== null).sort((a, b) => a - b);
    const usual = 1.6 * whole[Math.floor(0.9 * (whole.length - 1))];
    if (usual > 0 && hi > 1.5 * usual) [cut, hi] = [hi, usual];
  }
  if (spec.zero && lo === 0 && hi === 0) return [0, 1, cut]; // no shares or counts below nothing
  if (lo === hi) return [lo - (Math.abs(lo) * 0.1 || 1), hi + (Math.abs(hi) * 0.1 || 1), cut];
  const pad = 0.06 * (hi - lo);
  return [spec.zero || spec.stack || (lo >= 0 && lo < pad) ? Math.min(lo, 0) : lo - pad, cut ? hi : hi + pad, cut];
}

function xTicks(root, view, x0, x1, px, room, y) {
  const [unit, suffix] = view.axis.time ? timeUnit(x1) : [1, ""];
  const positions = ticks(x0 / unit, x1 / unit, Math.max(2, Math.floor(room / (view.axis.time ? 85 : 52))));
  positions.filter((t) => view.axis.key !== "step" || Number.isInteger(t)).forEach((t) => {
    const x = px(t * unit), text = format.number(t) + suffix;
    const anchor = x > px(x1) - 14 ? "end" : x < px(x0) + 10 ? "start" : "middle";
    root.append(el("svg:text", { class: `tick ${anchor}`, x, y, text }));
  });
}

function path(xs, ys, px, py) {
  let d = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] === null) { pen = "M"; return; }
    d += `${pen}${px(x).toFixed(1)},${py(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function paintLines(body, live, px, py) {
  for (const s of live) {
    if (s.raw !== s.y) body.append(el("svg:path", { class: "line raw", d: path(s.x, s.raw, px, py), stroke: s.color }));
  }
  for (const s of live) {
    body.append(el("svg:path", { class: "line", d: path(s.x, s.y, px, py), stroke: s.color, "stroke-dasharray": s.dash }));
    if (s.x.length <= 30) {
      s.x.forEach((x, i) => s.y[i] !== null && body.append(
        el("svg:circle", { class: "dot", cx: px(x), cy: py(s.y[i]), r: s.x.length === 1 ? 4 : 2.6, fill: s.color })));
    }
  }
}

function paintStack(body, live, px, py) {
  for (const s of live) {
    const x = s.x.length === 1 ? [s.x[0] - 0.4, s.x[0] + 0.4] : s.x;
    const pick = (ys) => (s.x.length === 1 ? [ys[0], ys[0]] : ys);
    const up = path(x, pick(s.top), px, py);
    const down = path([...x].reverse(), [...pick(s.base)].reverse(), px, py).replace("M", "L");
    body.append(el("svg:path", { class: "area", d: `${up}${down}Z`, fill: s.color }));
  }
}

function describe(spec, live, view) {
  const parts = live.map((s) => {
    const ys = s.y.filter((v) => v !== null);
    return `${s.name}: from ${spec.format(ys[0])} to ${spec.format(ys[ys.length - 1])}, ` +
      `lowest ${spec.format(Math.min(...ys))}, highest ${spec.format(Math.max(...ys))}`;
  });
  return `${spec.title} over ${view.axis.label}. ${parts.join("; ")}. Arrow keys read single values.`;
}

const swatch = (color) => {
  const node = el("i", { class: "swatch", "aria-hidden": "true" });
  node.style.background = color;
  return node;
};

/** Pointer and arrow keys move a cursor that reads the values of all series. */
function hover(plot, root, tip, spec, live, view, box) {
  const stops = [...new Set(live.flatMap((s) => s.x))].sort((a, b) => a - b);
  const line = el("svg:line", { class: "cursor", y1: box.top, y2: box.height - box.bottom, visibility: "hidden" });
  const marks = el("svg:g");
  root.append(line, marks);
  let at = -1;
  const hide = () => { tip.hidden = true; at = -1; marks.replaceChildren(); line.setAttribute("visibility", "hidden"); };
  const show = (index) => {
    at = Math.max(0, Math.min(stops.length - 1, index));
    const x = stops[at];
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", box.px(x));
    line.setAttribute("x2", box.px(x));
    marks.replaceChildren();
    const reach = Math.max((box.x1 - box.x0) / 40, stops.length > 1 ? (box.x1 - box.x0) / stops.length : 0);
    const rows = [];
    for (const s of spec.stack ? [...live].reverse() : live) {
      const i = nearest(s.x, x);
      if (s.y[i] === null || Math.abs(s.x[i] - x) > reach) continue;
      if (!spec.stack) marks.append(el("svg:circle", { class: "dot", cx: box.px(s.x[i]), cy: box.py(s.y[i]), r: 4, fill: s.color }));
      rows.push(el("div", {}, swatch(s.color), el("span", { text: s.name }), el("b", { text: spec.format(s.y[i]) }),
        s.raw && s.raw !== s.y && s.raw[i] !== null && el("small", { text: `raw ${spec.format(s.raw[i])}` })));
    }
    const label = view.axis.time ? format.seconds(x) : `${view.axis.label} ${x.toLocaleString("en-US", { maximumFractionDigits: 0 })}`;
    tip.replaceChildren(el("p", { text: label }), ...rows);
    tip.hidden = false;
    const w = tip.offsetWidth, beside = box.px(x) + 14;
    tip.style.left = `${Math.max(0, beside + w > box.width ? box.px(x) - w - 14 : beside)}px`;
    tip.style.top = `${box.top}px`;
  };
  const move = (event) => {
    const x = event.clientX - root.getBoundingClientRect().left;
    show(nearest(stops, box.x0 + ((x - box.left) / (box.width - box.left - box.right)) * (box.x1 - box.x0)));
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const ends = { Home: 0, End: stops.length - 1 };
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (event.key === "Escape") hide();
    else if (by) show(at < 0 ? (by > 0 ? 0 : stops.length - 1) : at + by);
    else if (event.key in ends) show(ends[event.key]);
    else return;
    event.preventDefault();
  });
}
