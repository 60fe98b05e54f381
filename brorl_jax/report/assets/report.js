/* The page: head, controls, curves, settings, rollouts. Everything is built from the JSON block of this file. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLORS = 8;
RUNS.forEach((run, i) => {
  run.color = `var(--run-${i % COLORS})`;
  run.dash = i < COLORS ? null : `${2 + 2 * Math.floor(i / COLORS)} 3`;
  run.on = true;
});

const AXES = [
  { key: "step", label: "step" },
  { key: "x/samples", label: "samples" },
  { key: "x/tokens", label: "tokens" },
  { key: "x/wall", label: "time", time: true },
];
const PHASES = ["rollout", "reward", "pack", "score", "diagnose", "update", "publish", "checkpoint", "eval"];
const view = { axis: AXES[0], weight: 0, stacked: 0 };

const SECTIONS = [
  ["Learning", [
    { title: "Held-out accuracy", hint: "pass@1 on prompts never trained on", keys: ["eval/pass@1"], format: format.percent, half: true, tall: true },
    { title: "Reward", hint: "mean raw reward of all samples of a step", keys: ["reward/mean"], format: format.number, half: true, tall: true },
  ]],
  ["Exploration", [
    { title: "Dynamic-sampling pass rate", hint: "groups kept of those generated", keys: ["groups/pass_rate"], format: format.percent, bounds: [0, 1] },
    { title: "Groups by outcome", hint: "how many rollouts of a prompt were right", stack: "groups", format: format.percent, bounds: [0, 1] },
    { title: "Entropy", hint: "nats per token of the policy", keys: ["policy/entropy"], format: format.number },
    { title: "KL to the reference", hint: "nats per token", keys: ["policy/kl_ref"], format: format.number },
    { title: "Response length", hint: "mean tokens", keys: ["length/mean"], format: format.number },
    { title: "Cut off by length", hint: "share of responses that hit the token limit", keys: ["length/truncated_rate"], format: format.percent, zero: true },
  ]],
  ["Mass balance", [
    { title: "Mass never sampled", hint: "probability of tokens no rollout drew, where rollouts branch", keys: ["mass_balance/unsampled"], format: format.percent, zero: true },
    { title: "Unsampled second moment", hint: "sum of p² over unsampled tokens at the first nodes", keys: ["mass_balance/unsampled_2"], format: format.number, zero: true },
    { title: "Batch mood", hint: "mean |S_R|; unsampled tokens move in proportion to it", keys: ["mass_balance/mood_abs"], format: format.number, zero: true },
    { title: "Gain by sampled tokens", hint: "the theorem's two sure terms, in units of the step size over n", keys: ["mass_balance/gain"], format: format.number, zero: true },
    { title: "Gain at risk", hint: "most that unsampled tokens could take back of it", keys: ["mass_balance/at_risk"], format: format.percent, zero: true },
    { title: "Sign is certain", hint: "share of visits where it cannot change, whatever the unsampled tokens are", keys: ["mass_balance/sign_certain"], format: format.percent, bounds: [0, 1] },
  ]],
  ["Stability", [
    { title: "Gradient norm", hint: "before clipping", keys: ["optim/grad_norm"], format: format.number, clip: true, zero: true },
    { title: "Clipped from above", hint: "share of tokens whose ratio met the upper bound", keys: ["policy/clip_high"], format: format.percent, zero: true },
    { title: "Engine–trainer mismatch", hint: "mean |difference| of the sampled tokens' log-probabilities, nats", keys: ["mismatch/mean"], format: format.number, zero: true },
    { title: "Engine–trainer KL", hint: "of the sampled tokens, nats per token", keys: ["mismatch/kl"], format: format.number, zero: true },
  ]],
  ["Cost", [
    { title: "Time of a step", hint: "seconds by phase", stack: "time", format: format.seconds, clip: true },
    { title: "Throughput", hint: "response tokens per second", keys: ["throughput/tokens_per_s"], format: format.number, zero: true },
    { title: "Update", hint: "trained tokens per second of updates", keys: ["throughput/update_tokens_per_s"], format: format.number, zero: true },
    { title: "Model FLOPs utilisation", hint: "model FLOPs / (seconds of updates × devices × peak bfloat16 FLOP/s)", keys: ["throughput/mfu"], format: format.percent, zero: true },
    { title: "Memory", hint: "resident memory of the trainer, GiB", keys: ["memory/rss_gib"], format: format.number, zero: true },
  ]],
  ["Rollout servers", [
    { title: "Generation", hint: "samples per second while groups are generated", keys: ["engine/samples_per_s"], format: format.number, zero: true },
    { title: "Server tokens", hint: "generated per second, by the servers' own count", keys: ["engine/server_tokens_per_s"], format: format.number, zero: true },
    { title: "Publishing", hint: "seconds to write new weights and until servers have proved them", keys: ["engine/publish_s"], format: format.seconds, zero: true },
    { title: "Prefix cache", hint: "share of prompt tokens that were not computed again", keys: ["engine/cache_hit_rate"], format: format.percent, bounds: [0, 1] },
    { title: "Requests running", hint: "mean over the step, per server", keys: ["engine/running_mean"], format: format.number, zero: true },
    { title: "Requests queued", hint: "mean over the step, per server", keys: ["engine/queued_mean"], format: format.number, zero: true },
    { title: "Attempts that failed", hint: "and were made again", keys: ["engine/retries"], format: format.number, zero: true, whole: true },
    { title: "Samples dropped", hint: "that no server delivered; they carry no reward", keys: ["engine/dropped"], format: format.number, zero: true, whole: true },
    { title: "Servers", hint: "that serve the current weights", keys: ["engine/servers"], format: format.number, zero: true, whole: true },
  ]],
];

/** The points of a metric of a run that exist, with its x axis. */
function points(table, key, axis, weight) {
  const x = [], raw = [];
  (table[key] || []).forEach((v, i) => {
    const at = (table[axis] || [])[i];
    if (v !== null && at !== null && at !== undefined) { x.push(at); raw.push(v); }
  });
  // Evaluations are few and each is a measurement of its own: a smoothed one would state a figure nobody measured.
  return { x, raw, y: key.startsWith("eval/") ? raw : smoothed(raw, weight) };
}

const shownRuns = () => RUNS.filter((run) => run.on);
const lines = (keys) => shownRuns().flatMap((run) => keys.map((key) => ({
  ...points(run.metrics, key, view.axis.key, view.weight), name: run.name, color: run.color, dash: run.dash })));

/** Layers of a stacked chart of one run: [{name, color, x, y, base, top}]. */
function layers(kind) {
  const table = RUNS[view.stacked].metrics, x = table[view.axis.key] || [];
  const get = (key) => table[key] || x.map(() => null);
  let named;
  if (kind === "groups") {
    const parts = ["groups/all_zero", "groups/all_equal", "groups/informative", "groups/all_one"].map(get);
    const total = x.map((_, i) => parts.reduce((sum, p) => sum + (p[i] || 0), 0));
    named = ["none right", "all equally partly right", "some right", "all right"].map((name, k) => [name, `var(--share-${k})`, parts[k].map((v, i) => (v || 0) / total[i])]);
    return stack(named, x, (i) => total[i] > 0);
  }
  const keys = Object.keys(table).filter((k) => k.startsWith("time/") && k !== "time/step_s").map((k) => k.slice(5, -2));
  keys.sort((a, b) => (PHASES.indexOf(a) + 1 || 99) - (PHASES.indexOf(b) + 1 || 99));
  named = keys.map((k, i) => [k, `var(--layer-${i % 9})`, get(`time/${k}_s`).map((v) => v || 0)]);
  const rest = get("time/step_s").map((v, i) => Math.max(0, (v || 0) - named.reduce((sum, n) => sum + n[2][i], 0)));
  if (rest.some((v) => v > 0)) named.push(["other", "var(--layer-rest)", rest]);
  return stack(named, x, (i) => named.some((n) => n[2][i] > 0)); // an evaluation before the first step took no step's time
}

/** Layers on one another, at those x whose index is to be shown. */
function stack(named, all, shown) {
  const x = all.filter((_, i) => shown(i));
  let base = x.map(() => 0);
  return named.map(([name, color, values]) => {
    const y = smoothed(values.filter((_, i) => shown(i)), view.weight), top = y.map((v, i) => v + base[i]);
    const layer = { name, color, x, y, base, top };
    base = top;
    return layer;
  }).filter((layer) => layer.x.length && layer.y.some((v) => v > 0));
}

const hasData = (spec) => (spec.stack
  ? RUNS.some((run) => (spec.stack === "groups" ? "groups/all_zero" in run.metrics : Object.keys(run.metrics).some((k) => k.startsWith("time/"))))
  : RUNS.some((run) => spec.keys.some((key) => key in run.metrics)));

const charts = [];
function redraw() {
  for (const { chart: c, series } of charts) c.draw(series(), c.view ? c.view() : view);
}
function addChart(spec, series, ownView) {
  const c = chart(spec);
  c.view = ownView;
  charts.push({ chart: c, series });
  return c.node;
}

/* ---- head ---- */

const arrow = (a, b, f) => `${f(a)} → ${f(b)}`;
const stat = (label, value, extra, big) => el("div", { class: "stat" + (big ? " big" : "") }, el("dt", { text: label }),
  el("dd", {}, el("b", { text: value }), extra ? el("span", { text: extra }) : null));

function runCard(run) {
  const f = run.facts, stats = [];
  if (f.held_out) {
    const points = 100 * (f.held_out[1] - f.held_out[0]);
    const gain = f.evaluations > 1 ? `${points >= 0 ? "+" : "−"}${Math.abs(points).toFixed(1)} points, best ${format.percent(f.held_out[2])}` : "one evaluation";
    stats.push(stat("held-out pass@1", arrow(f.held_out[0], f.held_out[1], format.percent), gain, true));
  }
  if (f.reward) stats.push(stat("reward", arrow(f.reward[0], f.reward[1], (v) => v.toFixed(3))));
  stats.push(stat("steps", f.total ? `${f.step} of ${f.total}` : String(f.step)));
  if (f.wall !== null) stats.push(stat("wall time", format.seconds(f.wall), f.warmup_wall ? `+ ${format.seconds(f.warmup_wall)} warm-up` : null));
  if (f.samples) stats.push(stat("samples", format.number(f.samples), `${format.number(f.tokens)} tokens`));
  const title = f.title && f.title !== run.name ? el("span", { class: "config", text: f.title }) : null;
  return el("article", { class: "card run" },
    el("h2", {}, swatch(run.color), el("span", { text: run.name }), title,
      el("span", { class: "state" + (f.finished ? " done" : ""), text: f.state })),
    el("dl", { class: "stats" }, stats),
    run.notes.length ? el("ul", { class: "notes" }, run.notes.map((text) => el("li", { text }))) : null);
}

const show = (value) => (value === undefined ? "–" : typeof value === "string" ? value || "“”" : JSON.stringify(value));

function table(caption, keys) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "setting" }),
      RUNS.map((run) => el("th", { scope: "col" }, swatch(run.color), el("span", { text: run.name }))))),
    el("tbody", {}, keys.map((key) => el("tr", {}, el("th", { scope: "row", text: key }),
      RUNS.map((run) => el("td", { text: show(run.config[key]) })))))));
}

function settings() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].sort();
  const differ = keys.filter((key) => new Set(RUNS.map((run) => show(run.config[key]))).size > 1);
  const key = ["model.path", "rollout.n", "rollout.prompts_per_step", "rollout.max_tokens", "rollout.temperature", "algo.advantage",
    "algo.loss", "algo.updates_per_step", "optim.lr", "optim.lr_rule", "filter.dynamic", "seed"].filter((k) => keys.includes(k));
  if (!keys.length) return null;
  const lead = RUNS.length > 1
    ? [el("h2", { text: "What differs" }), differ.length ? table("Settings that differ", differ) : el("p", { text: "The settings of these runs are the same." })]
    : [el("h2", { text: "Settings" }), el("dl", { class: "pairs" }, key.map((k) => el("div", {}, el("dt", { text: k }), el("dd", { text: show(RUNS[0].config[k]) }))))];
  return el("section", { class: "card" }, lead,
    el("details", {}, el("summary", { text: `The whole configuration (${keys.length} settings)` }), table("The whole configuration", keys)));
}

function events() {
  const all = RUNS.flatMap((run) => run.events.map((e) => ({ ...e, run })));
  if (!all.length) return null;
  const kinds = {};
  for (const e of all) (kinds[`${RUNS.indexOf(e.run)} ${e.text}`] ??= { run: e.run, text: e.text, steps: [] }).steps.push(e.step);
  const where = (s) => `step${s.length > 1 ? "s" : ""} ${s.slice(0, 12).join(", ")}${s.length > 12 ? ` and ${s.length - 12} more` : ""}`;
  return el("section", { class: "card" }, el("h2", { text: "Events" }), el("ul", { class: "events" },
    Object.values(kinds).map((k) => el("li", {}, RUNS.length > 1 ? swatch(k.run.color) : null, el("p", {}, el("span", { text: k.text }), " ", el("small", { text: where(k.steps) }))))));
}

/* ---- controls ---- */

function radios(name, label, options, current, change) {
  return el("fieldset", { class: "radios" }, el("legend", { text: label }), options.map(([value, text]) => el("label", {},
    el("input", { type: "radio", name, value, checked: value === current, change: () => change(value) }), el("span", { text }))));
}

function select(label, options, current, change) {
  return el("label", { class: "field" }, el("span", { text: label }), el("select", { "aria-label": label, change: (e) => change(e.target.value) },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(current), text }))));
}

function controls() {
  const axes = AXES.filter((a) => RUNS.some((run) => (run.metrics[a.key] || []).some((v) => v > 0)));
  const out = el("output", { text: "off" });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing", input: (e) => {
    view.weight = +e.target.value;
    out.textContent = view.weight ? view.weight.toFixed(2) : "off";
    redraw();
  } });
  const toggles = RUNS.length < 2 ? null : el("fieldset", { class: "toggles" }, el("legend", { text: "runs" }), RUNS.map((run) => el("label", {},
    el("input", { type: "checkbox", checked: true, change: (e) => { run.on = e.target.checked; redraw(); } }), swatch(run.color), el("span", { text: run.name }))));
  return el("div", { class: "controls" }, toggles,
    axes.length > 1 && radios("axis", "x axis", axes.map((a) => [a.key, a.label]), view.axis.key, (key) => { view.axis = AXES.find((a) => a.key === key); redraw(); }),
    el("label", { class: "field" }, el("span", { text: "smoothing" }), slider, out),
    RUNS.length > 1 && select("stacks show", RUNS.map((run, i) => [i, run.name]), 0, (i) => { view.stacked = +i; redraw(); }));
}

/* ---- curves ---- */

/** One panel per source of a mixture: its reward, and dashed the share of its groups that were kept. */
function sources() {
  const names = new Set(RUNS.flatMap((run) => Object.keys(run.metrics)).map((k) => /^source\/(\w+)\/reward$/.exec(k)).filter(Boolean).map((m) => m[1]));
  if (names.size < 2) return null;
  const panels = [...names].sort().map((name) => addChart(
    { title: name, hint: "reward; dashed: share of groups kept", format: format.number, bounds: [0, 1] },
    () => [["reward", null], ["kept", "5 3"]].flatMap(([what, dash]) => lines([`source/${name}/${what}`]).map((line) => (
      { ...line, name: RUNS.length > 1 ? `${line.name}, ${what}` : what, dash: dash || line.dash })))));
  return el("section", { id: "sources" }, el("h2", { text: "Sources" }), el("div", { class: "grid" }, panels));
}

function anyMetric() {
  const known = new Set(SECTIONS.flatMap(([, specs]) => specs.flatMap((s) => s.keys || [])));
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((k) => k !== "step" && !k.startsWith("x/") && !known.has(k)).sort();
  if (!keys.length) return null;
  let key = keys.find((k) => k.startsWith("eval/")) || keys[0];
  const spec = { title: "Any other metric", hint: "as it stands in metrics.jsonl", format: format.number, wide: true };
  const node = addChart(spec, () => lines([key]));
  node.querySelector("figcaption").append(select("metric", keys.map((k) => [k, k]), key, (k) => { key = k; redraw(); }));
  return node;
}

/** A title within a sentence: "Model FLOPs utilisation" loses its first capital, "KL to the reference" keeps both. */
const inSentence = (title) => title.replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase());

function curves() {
  const missing = [];
  const parts = SECTIONS.map(([title, specs]) => {
    const nodes = specs.filter((spec) => hasData(spec) || (missing.push(spec.title), false))
      .map((spec) => addChart(spec, spec.stack ? () => layers(spec.stack) : () => lines(spec.keys)));
    return nodes.length ? el("section", {}, el("h2", { text: title }), el("div", { class: "grid" + (specs[0].half ? " two" : "") }, nodes)) : null;
  });
  const loss = RUNS.some((run) => run.warmup["warmup/loss"]) && el("section", {}, el("h2", { text: "Warm start" }), el("div", { class: "grid" },
    addChart({ title: "Supervised loss", hint: "cross-entropy, nats per token, before reinforcement learning", format: format.number, wide: true },
      () => shownRuns().map((run) => ({ ...points(run.warmup, "warmup/loss", "step", view.weight), name: run.name, color: run.color, dash: run.dash })),
      () => ({ axis: AXES[0], weight: view.weight }))));
  const bySource = sources();
  const other = anyMetric();
  const none = parts.every((p) => !p);
  return el("section", { id: "curves" },
    none ? el("p", { class: "card empty", text: "No training step has finished yet, so there are no curves." }) : controls(),
    parts, bySource, loss, other && el("section", {}, el("div", { class: "grid" }, other)),
    !none && missing.length ? el("p", { class: "aside", text: `Not measured in these runs: ${missing.map(inSentence).join(", ")}.` }) : null);
}

document.getElementById("head").append(
  el("p", { class: "eyebrow", text: "brorl_jax · training report" }),
  el("h1", { text: RUNS.length > 3 ? `${RUNS.length} runs compared` : RUNS.map((run) => run.name).join(" vs ") }),
  el("div", { class: "runs" }, RUNS.map(runCard)));
document.getElementById("main").append(...[curves(), settings(), events(), browser(RUNS, select)].filter(Boolean));
document.getElementById("foot").append(el("p", { text: `Made ${DATA.made}. Everything shown is inside this file; it loads nothing.` }));
redraw();
