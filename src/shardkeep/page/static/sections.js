// The sections of the page: each function draws one from the state of a run, and returns its content.
import { bytes, clock, decimal, duration, integer, jobClock, milliseconds, percent, short } from "./format.js";
import { ago, bar, fold, h, table } from "./dom.js";
import { plot, points } from "./plots.js";

const STEP_PARTS = {
  data: ["samples", "waits for the next batch"],
  pull_wait: ["pull wait", "waits for rows from the servers"],
  lookup: ["lookup", "pools rows into the input of the dense model"],
  forward: ["forward", "computes predictions and the loss"],
  backward: ["backward", "computes gradients"],
  collect: ["collect", "sums the gradients of each row"],
  dense_reduce: ["tower reduce", "sums dense gradients over the workers, and waits for the slowest one"],
  optimizer: ["optimizer", "updates the dense model"],
  keep: ["keep", "copies the dense model, to go back after a death"],
  push: ["push", "encodes row gradients and sends them"],
  other: ["other", "everything else"],
};
const LOOP_PARTS = {
  data: "waits for the next batch, in client.ahead",
  lookup: "finds the unique ids, and makes tensors of the rows",
  other: "your loop: samples, model and optimizer",
};
const DIRECTION_NAMES = { push: "push", pull: "pull", tower: "tower", read: "evaluation", control: "control" };
const SECTION_NAMES = { steps: "where a step goes", convergence: "convergence", members: "members", checkpoints: "checkpoints" };
const ENDED = ["completed", "incomplete", "failed", "stopped", "killed", "gone"];

export const ended = (run) => ENDED.includes(run.overview.state);

function tile(name, value, unit, about, extra) {
  return h("div.tile", h("dt", name), h("dd", h("span.value", value), unit ? h("span.unit", ` ${unit}`) : null, extra, h("span.about", about)));
}

const score = (run, key) => run.overview.evaluation.find((one) => one.key === key);

export function overview(run) {
  const o = run.overview;
  const share = o.total_steps ? o.step / o.total_steps : null;
  const main = score(run, "auc") ?? o.evaluation[0];
  const trained = run.bytes.per_sample;
  const saved = o.fp32_bytes > 1.05 * o.bytes ? o.fp32_bytes / o.bytes : null;
  const left = ended(run)
    ? tile("Time taken", duration(o.wall_s), "", "wall time of all starts, with start-up and evaluations")
    : o.loop ? tile("Time so far", duration(o.newest == null ? null : o.newest - o.began), "", "since the job began; only your loop knows its last step")
    : tile("Time left", o.left_s == null ? "–" : duration(o.left_s), "", o.left_s == null ? "known after a few steps" : `to the last step, by the mean step of the last five minutes; done at about ${clock(jobClock.now() + o.left_s)}`);
  return [
    h("dl.tiles",
      tile("Step", integer(o.step), o.total_steps ? `of ${integer(o.total_steps)}` : "", share == null ? "in a step each worker trains one batch" : `${percent(share)} done; in a step each worker trains one batch`, share == null ? null : bar(share)),
      o.samples_per_s == null && o.steps_per_s != null
        ? tile("Speed", decimal(o.steps_per_s, 1), "steps/s", ended(run) ? "mean over the run" : "since the last record")
        : tile("Speed", integer(o.samples_per_s), "samples/s", ended(run) ? "mean over the run, all workers together" : "all workers together, since the last record"),
      left,
      tile("Loss", decimal(o.loss), "", o.loop && o.loss == null ? "shown once your loop calls client.report(loss=...)" : "training loss of worker 0 since its last record; lower is better"),
      tile(main ? main.name : "Evaluation", main ? decimal(main.value) : "–", "", main ? `last evaluation${o.best_auc != null && main.key === "auc" ? `; the best possible is ${decimal(o.best_auc)}` : ""}${main.key === "auc" ? "; 0.5 is guessing, 1 is perfect" : ""}` : o.loop ? "shown once your loop calls client.report(eval={...})" : "no evaluation yet"),
      tile(o.servers === 0 ? "Messages" : "Sent for training", bytes(o.bytes), "", o.servers === 0 ? "one process sends nothing; this is what pulls and pushes would take" : o.bytes ? `pulls, pushes and dense gradients${trained ? `: ${bytes(trained)} a sample` : ""}` : "counted by the workers' records"),
      saved ? tile("Compression", `${decimal(saved, 1)} ×`, "", `less than the ${bytes(o.fp32_bytes)} of fp32 without compression`) : null,
      tile("Recoveries", integer(o.recoveries), "", o.state === "recovering" ? "before the one that is under way" : o.recoveries ? "times a process was lost and training continued" : "no process was lost"),
    ),
    o.test.length ? h("p", "On the test data: ", o.test.map((m) => `${m.name} ${decimal(m.value)}`).join(", "), ".") : null,
  ];
}

export function warnings(run) {
  if (!run.warnings.length) {
    if (["starting", "forming"].includes(run.overview.state)) return [h("p.good", "The job is starting. Figures appear after its first steps.")];
    return [h("p.good", ended(run) ? "No warnings." : "Nothing looks wrong.")];
  }
  const words = { bad: "Problem", warn: "Warning", note: "Note" };
  return [h("ul.warnings", run.warnings.map((w) => h(`li.${w.level}`, h("span.level", words[w.level]), " ", h("strong", w.text), " ", h("span.advice", w.advice, " ", w.about ? h("a", { href: `#${w.about}` }, `See ${SECTION_NAMES[w.about] ?? w.about}.`) : null))))];
}

// Chooses the horizontal axis of all plots. One process sends no bytes.
function axisChoice(name, view, axis, runs) {
  const sent = runs.some((run) => run.overview.servers !== 0) ? [["bytes", "bytes sent"]] : [];
  const radios = [firstAxis(runs), ...sent, ["time", "time"]].map(([key, text]) => h("label",
    h("input", { type: "radio", name, value: key, checked: key === axis, "data-key": `${name} ${key}`, onchange: () => view.choose(key) }), text));
  return h("fieldset.choice", h("legend", "Horizontal axis"), radios);
}

// A loop of the user's own may not say how many samples a step has: then steps take their place.
const inSteps = (runs) => runs.some((run) => run.curves.training.rows.length) && runs.every((run) => run.curves.training.rows.every((row) => row[2] == null));
const axisOf = (runs, view) => (view.axis === "samples" || view.axis === "step" ? (inSteps(runs) ? "step" : "samples") : view.axis);
const firstAxis = (runs) => (inSteps(runs) ? ["step", "steps"] : ["samples", "samples"]);

export function convergence(run, view, note) {
  const { curves } = run;
  const from = run.overview.began ?? 0;
  const axis = axisOf([run], view);
  const counted = curves.training.rows.some((row) => row[3] != null);
  const names = curves.evaluation.columns.slice(4);
  const main = names.filter((name) => name.split("/")[0] === "auc");
  const shown = main.length ? main : names.slice(0, 1);
  const others = names.filter((name) => ["logloss", "mse", "rmse", "mae"].includes(name.split("/")[0]));
  const { loop } = run.overview;
  const line = (curve, name, label) => ({ name: label, points: points(curve, axis, name, from).filter(([, y]) => !loop || y != null) });
  const label = (name) => curves.evaluation.names[names.indexOf(name)];
  const figure = (key, parts) => plot(key, { axis, over: ended(run), ...parts });
  return [
    axisChoice("axis", view, axis, [run]),
    axis === "bytes" && !counted ? h("p.about", "The bytes of this run were not counted over time, so there are no points.") : null,
    h("div.plots",
      figure("loss", { title: "Training loss", about: loop && !curves.training.rows.some((row) => row[4] != null) ? "Your loop reports it by client.report(loss=...)." : "Loss of worker 0 on the samples it trains on, mean since the record before.", unit: "loss", lines: [line(curves.training, "loss", "training loss")] }),
      figure("quality", { title: shown.length ? `Evaluation: ${label(shown[0])}` : "Evaluation", about: loop && !names.length ? "Your loop reports it by client.report(eval={...})." : `On samples that are not trained on.${main.length ? " Higher AUC is better." : ""}`, unit: shown.length ? label(shown[0]) : "", lines: shown.slice(0, 6).map((name) => line(curves.evaluation, name, label(name))), limit: curves.best_auc == null || !main.length ? null : { name: "best possible", value: curves.best_auc } }),
      others.length ? figure("evaluation loss", { title: `Evaluation: ${label(others[0])}`, about: "On samples that are not trained on. Lower is better.", unit: label(others[0]), lines: others.slice(0, 6).map((name) => line(curves.evaluation, name, label(name))) }) : null,
      inSteps([run])
        ? figure("speed", { title: "Speed", about: "Steps a second. Dips are evaluations and recoveries.", unit: "steps/s", digits: 1, lines: [line(curves.training, "steps_per_s", "steps/s")] })
        : figure("speed", { title: "Speed", about: "Samples a second, all workers together. Dips are evaluations and recoveries.", unit: "samples/s", digits: 0, lines: [line(curves.training, "samples_per_s", "samples/s")] }),
      ...(run.quality ? quality(run.quality, figure) : []),
    ),
    note ? h("p.about", note) : null,
  ];
}

// Of a stored page: how probabilities and labels agree on the evaluation rows.
const quality = ({ calibration, scores }, figure) => [
  figure("calibration", { title: "Calibration", about: "Ten groups of as many evaluation samples, by their probability. On the line of the perfect model, the share of positives is the probability.", axis: "score", unit: "share of positives", lines: [{ name: "this model", points: calibration }, { name: "perfect", points: calibration.map(([x]) => [x, x]) }] }),
  figure("scores", { title: "Probabilities by label", about: "Share of the samples of each label whose probability is in a twentieth of all probabilities.", axis: "score", unit: "share of samples", digits: 3, lines: Object.entries(scores).map(([label, counts]) => ({ name: `label ${label}`, points: counts })) }),
];

export function steps(run) {
  if (!run.steps.length) return [h("p.empty", "No worker has reported a step yet.")];
  const longest = Math.max(...run.steps.map((row) => row.total));
  const means = Object.keys(STEP_PARTS).map((part) => [part, mean(run.steps.map((row) => row.parts[part] ?? 0))]).filter(([, ms]) => ms > 0);
  const total = means.reduce((sum, [, ms]) => sum + ms, 0);
  const strip = (row) => h("span.strip", { "aria-hidden": "true", style: { width: `${(100 * row.total) / longest}%` } },
    Object.keys(STEP_PARTS).filter((part) => row.parts[part]).map((part) => h(`span.part-${part}`, { title: `${STEP_PARTS[part][0]}: ${milliseconds(row.parts[part])}`, style: { flex: `${row.parts[part]} 0 0` } })));
  const waits = (row) => Object.entries(row.waits).sort((a, b) => b[1] - a[1]).slice(0, 2).map(([who, ms]) => `${who}: ${milliseconds(ms)}`).join(", ") || (row.parts.pull_wait ? milliseconds(row.parts.pull_wait) : "–");
  const rows = run.steps.map((row) => ({ ...row, mark: run.steps.length > 1 && row.ratio > 1.4 ? "slow" : null }));
  const alone = run.steps.length === 1;
  const over = ended(run) ? "over the run" : "over the last 30 seconds";
  const { loop } = run.overview;
  const about = (part) => (loop ? LOOP_PARTS[part] : null) ?? STEP_PARTS[part][1];
  return [
    h("p", alone ? `Mean time of a step ${over}, by part.` : `Mean time of a step ${over}, by part, of each worker. The worker whose own work takes longest is the first: the others wait for it${loop ? "" : " in tower reduce"}.`, loop ? " A step ends with apply." : ""),
    h("ul.legend", means.map(([part, ms]) => h("li", { title: about(part) }, h(`span.swatch.part-${part}`), h("b", STEP_PARTS[part][0]), ` ${milliseconds(ms)}, ${percent(ms / total)}`, h("span.about", about(part))))),
    table("steps", "Time of a step by worker, slowest own work first", [
      { name: "worker", text: (row) => `worker ${row.index}` },
      { name: "own work", num: true, note: `the step without pull wait${loop ? "" : " and tower reduce"}`, text: (row) => (row.mark ? h("b", milliseconds(row.own)) : milliseconds(row.own)) },
      ...(alone ? [] : [{ name: "vs others", note: "own work, divided by the median of the other workers", num: true, text: (row) => `${decimal(row.ratio, 2)} ×` }]),
      { name: "parts of a step", text: strip },
      { name: "step", num: true, text: (row) => milliseconds(row.total) },
      ...(run.overview.servers === 0 ? [] : [{ name: "waits for servers", text: (row) => h("span.line", waits(row)) }]),
    ], rows, { most: 8, of: "workers" }),
    denseModel(run.dense),
  ];
}

function denseModel({ choices, compile_s: seconds, compile_bytes: memory, flops_per_s: rate }) {
  if (choices == null && rate == null) return null;
  const flops = (value) => `${short(value)}FLOP/s`;
  return h("p", h("b", "Dense model"), choices == null ? ". " : `: ${choices}. `,
    seconds ? `Compiling took ${duration(seconds)}${memory ? ` and ${bytes(memory)} of memory` : ""}. ` : null,
    rate == null ? null : `Worker 0 makes ${flops(rate)} in matrix products.`);
}

export function tables(run) {
  const { rows, ids, unique_ids: unique } = run.tables;
  if (!rows.length) return [h("p.empty", "No server has reported its tables yet.")];
  const most = Math.max(...rows.map((row) => row.bytes ?? 0));
  const sum = (key) => rows.reduce((total, row) => total + (row[key] ?? 0), 0);
  const has = (key) => rows.some((row) => row[key]);
  const known = (key) => rows.some((row) => row[key] != null);
  const policy = (has("removed") || has("refused") ? ["created", "removed", "refused"] : []).filter(known).map((key) => ({ name: key, num: true, note: { created: "rows that the first gradient of an id made", removed: "rows that an eviction rule took", refused: "new ids that an admission rule did not take" }[key], text: (row) => integer(row[key]) }));
  const growing = rows.some((row) => row.growth != null);
  return [
    h("p", `${rows.length} tables with ${integer(sum("rows"))} rows, ${bytes(sum("bytes"))} ${run.overview.servers === 0 ? "in memory" : "on the servers"}. `,
      ids && unique ? `${percent(1 - unique / ids)} of the ids in a worker's batch were duplicates: ${short(ids)} ids, ${short(unique)} unique ones were requested.` : null),
    table("tables", "Tables, largest first", [
      { name: "table", text: (row) => row.name },
      { name: "rows", num: true, text: (row) => integer(row.rows) },
      ...(growing ? [{ name: "rows/min", num: true, note: "new rows a minute, over the last minutes", text: (row) => integer(row.growth) }] : []),
      { name: "memory", num: true, text: (row) => bytes(row.bytes) },
      { name: "", text: (row) => bar(most ? (row.bytes ?? 0) / most : 0) },
      ...policy,
      ...(known("dim") ? [{ name: "dim", num: true, note: "values of a row", text: (row) => integer(row.dim) }, { name: "optimizer", text: (row) => row.optimizer ?? "–" }] : []),
    ], rows, { most: 10, of: "tables" }),
  ];
}

export function byteKinds(run) {
  const { directions, per_sample: perSample } = run.bytes;
  if (!directions.length) return [h("p.empty", run.overview.servers === 0 ? "One process does everything: nothing is sent." : "No worker has counted its bytes yet.")];
  const most = Math.max(...directions.map((d) => Math.max(d.bytes, d.fp32 ?? 0)));
  const total = directions.reduce((sum, d) => sum + d.bytes, 0);
  const saves = directions.some((d) => d.fp32);
  const parts = directions.flatMap((d) => d.parts.map((part) => ({ ...part, direction: DIRECTION_NAMES[d.name] })));
  const alone = run.overview.servers === 0;
  return [
    h("p", alone ? `One process sends nothing. Its pulls and pushes hold ${bytes(total)}. ` : `${bytes(total)} between all processes. `, perSample ? `Training took ${bytes(perSample)} a sample. ` : "", saves ? "fp32 is what the same rows and gradients take as 32-bit floats with raw ids, without compression; its bar is grey." : "What fp32 would have sent is not known for this run."),
    table("bytes", "Bytes by kind, beside fp32", [
      { name: "kind", text: (d) => h("span", h("b", DIRECTION_NAMES[d.name]), h("span.about", d.meaning)) },
      { name: alone ? "size" : "sent", num: true, text: (d) => bytes(d.bytes) },
      ...(saves ? [{ name: "fp32", num: true, text: (d) => bytes(d.fp32) }, { name: "saved", num: true, text: (d) => (d.fp32 ? percent(Math.max(0, 1 - d.bytes / d.fp32)) : "–") }] : []),
      { name: saves ? "beside fp32" : "", text: (d) => h("span.pair", bar(d.bytes / most), d.fp32 ? bar(d.fp32 / most, "ghost") : null) },
      { name: "share", num: true, note: "of all bytes", text: (d) => percent(d.bytes / total) },
    ], directions),
    parts.length ? fold("byte parts", "What the bytes are", table("parts", "Bytes by part of a message", [
      { name: "part", text: (p) => h("span", h("b", p.name), h("span.about", p.meaning)) },
      { name: "kind", text: (p) => p.direction },
      { name: "bytes", num: true, text: (p) => bytes(p.bytes) },
    ], parts, { most: 30 })) : null,
  ];
}

export function staleness(run) {
  const { counts, mode, bound } = run.staleness;
  const rules = { sync: "Mode sync: every step reads rows with all updates of the steps before it.", bounded: `Mode bounded: a step may read rows that lack the updates of at most ${bound} ${bound === 1 ? "step" : "steps"}.`, async: "Mode async: there is no bound." };
  const total = counts.reduce((sum, [, times]) => sum + times, 0);
  if (!total) return [h("p", rules[mode] ?? ""), h("p.empty", "No step has been counted yet.")];
  const average = counts.reduce((sum, [age, times]) => sum + age * times, 0) / total;
  return [
    h("p", `${rules[mode] ?? ""} The mean is ${decimal(average, 2)} steps.`),
    table("staleness", "Steps by age of their rows", [
      { name: "rows are older by", text: (row) => `${row[0]} ${row[0] === 1 ? "step" : "steps"}` },
      { name: "", text: (row) => bar(row[1] / total) },
      { name: "share", num: true, text: (row) => percent(row[1] / total, 1) },
      { name: "steps", num: true, note: "over all workers", text: (row) => integer(row[1]) },
    ], counts, { most: 16 }),
  ];
}

export function members(run, view) {
  const troubled = (m) => (m.deaths ? 0 : m.role === "coordinator" ? 1 : m.role === "server" ? 2 : 3);
  const rows = [...run.members].sort((a, b) => troubled(a) - troubled(b) || (b.rss ?? b.peak ?? 0) - (a.rss ?? a.peak ?? 0));
  const live = !ended(run);
  const size = (m) => (live ? m.rss : m.peak ?? m.rss);
  const most = Math.max(1, ...rows.map((m) => m.limit ?? 0), ...rows.map((m) => size(m) ?? 0));
  const has = (key) => rows.some((m) => m[key] != null);
  return [
    h("h3", "Time line"),
    ...timeLine(run),
    h("h3", "Processes"),
    rows.length ? table("members", "Processes, those that died first", [
      { name: "process", text: (m) => `${m.role} ${m.index}` },
      { name: "log", screen: true, text: (m) => view.logButton(m.role, m.index) },
      { name: "deaths", num: true, text: (m) => (m.deaths ? h("b", integer(m.deaths)) : integer(m.deaths)) },
      ...(has("seen") && live ? [{ name: "last record", num: true, note: "when this process last said how it is", text: (m) => ago(m.seen) }] : []),
      { name: live ? "memory" : "peak memory", num: true, note: "resident memory of the process; the bar is its share of the limit", text: (m) => bytes(size(m)) },
      { name: "", text: (m) => bar((size(m) ?? 0) / (m.limit ?? most), m.limit && size(m) > 0.9 * m.limit ? "alarm" : "") },
      ...(has("limit") ? [{ name: "limit", num: true, text: (m) => bytes(m.limit) }] : []),
      ...(has("step") ? [{ name: "step", num: true, text: (m) => integer(m.step) }] : []),
      ...(has("request_ms") ? [{ name: "request", num: true, note: "mean time in which a server answers a pull or push", text: (m) => (m.role === "server" ? milliseconds(m.request_ms) : "–") }] : []),
      ...(has("parked") ? [{ name: "parked pulls", num: true, note: "pulls that wait for other workers' pushes", text: (m) => (m.role === "server" ? integer(m.parked) : "–") }] : []),
      { name: "place", text: (m) => (m.host ? h("span.line", `${m.host}, pid ${m.pid ?? "–"}`) : "–") },
    ], rows, { most: 10, of: "processes" }) : h("p.empty", "No process has registered yet."),
  ];
}

function timeLine(run) {
  const line = run.timeline;
  const end = line.to ?? Math.max(run.overview.newest ?? 0, line.from ?? 0);
  const width = end - line.from;
  if (!line.from || width <= 0) return [h("p.empty", "Nothing has happened yet.")];
  const at = (t) => `${(100 * Math.min(1, Math.max(0, (t - line.from) / width))).toFixed(3)}%`;
  const lanes = new Map();
  for (const span of line.spans) lanes.set(`${span.role} ${span.index}`, [...(lanes.get(`${span.role} ${span.index}`) ?? []), span]);
  const sorted = [...lanes].sort(([a, x], [b, y]) => hurt(y) - hurt(x) || a.localeCompare(b, "en", { numeric: true }));
  const lane = ([name, spans]) => h("div.lane", h("span.name", name), h("span.track", spans.map((span) =>
    h(`span.life${span.end === "died" || span.end === "failed" ? ".died" : ""}`, { title: `${name}: ${clock(span.from)} to ${span.to ? clock(span.to) : "now"}${span.end ? `, ${span.end}` : ""}`, style: { left: at(span.from), right: `calc(100% - ${at(span.to ?? end)})` } }))));
  const shown = sorted.length > 10 ? Math.max(6, sorted.filter(([, spans]) => hurt(spans)).length) : sorted.length;
  const kinds = [["generation", "generation formed"], ["death", "process died"], ["recovery", "training resumed"], ["checkpoint", "checkpoint written"]].filter(([kind]) => line.marks.some((mark) => mark.kind === kind));
  const failed = line.spans.some((span) => span.end === "died" || span.end === "failed");
  const events = line.marks.filter((mark) => mark.kind !== "checkpoint").reverse();
  return [
    h("div.timeline", { role: "img", "aria-label": `Time line of ${duration(width)}: ${run.overview.recoveries} recoveries. The list below has the same events.` },
      h("div.lane", h("span.name", "events"), h("span.track.marks", line.marks.filter((mark) => mark.kind !== "note").map((mark) => h(`span.mark.${mark.kind}`, { title: `${clock(mark.at)} ${mark.text}`, style: { left: at(mark.at) } })))),
      sorted.slice(0, shown).map(lane)),
    sorted.length > shown ? fold("lanes", `Show ${sorted.length - shown} more processes, none of which died`, h("div.timeline", sorted.slice(shown).map(lane))) : null,
    h("p.scale", h("span", clock(line.from)), h("span", duration(width)), h("span", line.to ? clock(line.to) : "now")),
    h("ul.legend.marks", kinds.map(([kind, name]) => h("li", h(`span.mark.${kind}`), name)), failed ? h("li", h("span.mark.end"), "end by death or error") : null),
    h("ol.events", events.slice(0, 6).map(event)),
    events.length > 6 ? fold("events", `Show ${events.length - 6} earlier events`, h("ol.events", events.slice(6).map(event))) : null,
  ];
}

const hurt = (spans) => (spans.some((span) => span.end === "died" || span.end === "failed" || span.end === "replaced") ? 1 : 0);
const event = (mark) => h(`li.${mark.kind}`, h("time", clock(mark.at)), " ", mark.text);

export function checkpoints(run) {
  if (!run.checkpoints.length) return [h("p.empty", run.overview.loop ? "There is no checkpoint yet. Your loop writes one by client.checkpoint." : "There is no checkpoint yet. The setting checkpoint.every_steps says how often one is written.")];
  return [
    h("p", `${run.checkpoints.length} complete ${run.checkpoints.length === 1 ? "checkpoint is" : "checkpoints are"} kept. ${run.overview.loop ? "Trainers that are started again resume" : "A job that dies resumes"} from the newest one.`),
    table("checkpoints", "Checkpoints, newest first", [
      { name: "step", text: (c) => integer(c.step) },
      { name: "written", text: (c) => h("span.line", clock(c.at), ended(run) ? null : [", ", ago(c.at)]) },
      { name: "size", num: true, note: "of its own files", text: (c) => bytes(c.bytes) },
      { name: "holds", text: (c) => h("span.line", c.base == null ? "all rows" : `changes since step ${integer(c.base)}`) },
      { name: "took", num: true, note: "from the snapshot to the last file on disk", text: (c) => duration(c.seconds) },
      { name: "held training up", num: true, note: "how long the steps waited for it", text: (c) => duration(c.held_s) },
      { name: "folder", text: (c) => h("code.line", c.name) },
    ], run.checkpoints),
  ];
}

export function config(run) {
  const { text, changed } = run.config;
  return [
    changed?.length ? table("changed", "Settings that are not the defaults", [{ name: "setting", text: (pair) => setting(pair[0]) }, { name: "value", text: (pair) => h("code", pair[1]) }], changed, { most: 40, of: "settings" }) : h("p.about", changed === null ? "This config is of another version, so it is not compared with the defaults." : "All settings are the defaults."),
    fold("config", "The whole config.yaml, with every default", h("pre", { tabindex: 0 }, text)),
  ];
}

// The name of a setting, which may be broken behind a dot.
const setting = (key) => h("code", key.split(/(?<=[._])/).flatMap((part) => [part, h("wbr")]));

// `between`: rows of a name and a text for each run, as page/comparison.py makes them; `differences`: of a stored page.
export function compare(runs, view, { results, settings, differences, note }) {
  const from = (run) => run.overview.began ?? 0;
  const metrics = [...new Map(runs.flatMap((run) => run.overview.evaluation.map((m) => [m.key, m.name])))];
  const columns = (name, num) => [{ name, text: (row) => (num ? row[0] : setting(row[0])) }, ...runs.map((run, at) => ({ name: h("span", h(`span.swatch.line-${at % 6 + 1}`), run.name), num, text: (row) => (num ? row[at + 1] : h("code", row[at + 1])) }))];
  const axis = axisOf(runs, view);
  const lines = (pick) => runs.slice(0, 6).map((run, at) => ({ name: run.name, points: pick(run), color: `--line-${at + 1}` }));
  const main = metrics.some(([key]) => key === "auc") ? "auc" : metrics[0]?.[0];
  const over = runs.every(ended);
  return [
    h("h3", "Results"),
    table("compare", "Results of the runs", columns("figure", true), results, { most: 40 }),
    differences ? [h("h3", "Differences"), table("intervals", "Differences on the same evaluation rows", differences[0].map((name, at) => ({ name, text: (row) => row[at] })), differences.slice(1), { most: 40 })] : null,
    note ? h("p.about", note) : null,
    settings.length ? h("h3", "Settings that differ") : null,
    settings.length ? table("differences", "Settings that differ", columns("setting", false), settings, { most: 12, of: "settings" }) : h("p", "The runs have the same settings."),
    axisChoice("axis of compare", view, axis, runs),
    h("div.plots",
      main ? plot("compare quality", { title: metrics.find(([key]) => key === main)[1], about: "On samples that are not trained on.", axis, unit: metrics.find(([key]) => key === main)[1], over, lines: lines((run) => points(run.curves.evaluation, axis, main, from(run))) }) : null,
      plot("compare loss", { title: "Training loss", about: "Loss of worker 0 of each run.", axis, unit: "loss", over, lines: lines((run) => points(run.curves.training, axis, "loss", from(run))) })),
  ];
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
