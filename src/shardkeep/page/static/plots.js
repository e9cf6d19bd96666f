// Plots: curves over samples, bytes or time, by uPlot. Each has a title, a text alternative and a table of its points.
import { bytes, decimal, duration, integer, short } from "./format.js";
import { fold, h } from "./dom.js";

const TABLE_POINTS = 12;
const STEEP = 50; // a curve whose highest value is so many times its lowest one has a logarithmic axis
const figures = new Map();

const X = {
  step: { name: "steps", text: short, long: (v) => `${integer(v)} steps`, bare: integer },
  samples: { name: "samples trained", text: short, long: (v) => `${integer(v)} samples`, bare: integer },
  bytes: { name: "bytes sent for training", text: bytes, long: bytes, bare: bytes },
  time: { name: "time since the start", text: duration, long: duration, bare: duration },
  score: { name: "predicted probability", text: short, long: (v) => `probability ${decimal(v, 3)}`, bare: (v) => decimal(v, 3) },
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Draws a figure. `lines`: [{name, points: [[x, y]], color}]. `over`: no point follows. Returns the same element for the same key.
export function plot(key, { title, about, axis, unit, digits = 4, lines, limit, over = false }) {
  const known = figures.get(key) ?? made(key);
  const x = X[axis];
  const drawn = lines.filter((line) => line.points.length);
  known.title.textContent = title;
  known.about.textContent = about;
  const steep = digits > 0 && axis !== "score" && isSteep(drawn);
  const lonely = drawn.every((line) => line.points.length === 1) ? `One point${over ? "" : " so far"}. ${drawn.map((line) => onlyPoint(line, x, digits)).join(" ")}` : null;
  known.axis.textContent = !drawn.length ? "" : `Horizontal: ${x.name}. Vertical: ${unit}${steep ? ", on a logarithmic scale" : ""}.`;
  known.canvas.setAttribute("aria-label", `${title}. ${drawn.map((line) => spoken(line, x, digits)).join(" ")}`);
  known.table.replaceChildren(...drawn.map((line) => pointTable(line, x, unit, digits)));
  known.fold.hidden = !drawn.length;
  known.draw(drawn, x, { digits, limit, steep, empty: drawn.length ? lonely : `No points${over ? "" : " yet"}.` });
  return known.figure;
}

function made(key) {
  const [title, about, axis, canvas, inside] = [h("h3"), h("p.about"), h("p.axis"), h("div.plot", { role: "img" }), h("div")];
  const folded = fold(`${key} points`, "Points as a table", inside);
  const figure = h("figure", h("figcaption", title, about), canvas, axis, folded);
  const known = { figure, title, about, axis, canvas, table: inside, fold: folded, chart: null, shape: "" };
  known.draw = (lines, x, { digits, limit, steep, empty }) => {
    if (empty) {
      known.chart?.destroy();
      known.chart = null;
      known.shape = "";
      canvas.replaceChildren(h("p.empty", empty));
      return;
    }
    const data = aligned(lines);
    if (limit != null) data.push(data[0].map(() => limit.value));
    const shape = JSON.stringify([x.name, lines.map((line) => [line.name, line.color, line.points.length < 40]), limit?.name, steep]);
    if (known.chart && known.shape === shape) {
      known.chart.setData(data);
    } else {
      known.chart?.destroy();
      canvas.replaceChildren();
      known.shape = shape;
      known.chart = new uPlot(options(canvas, lines, x, { digits, limit, steep }), data, canvas);
    }
    latest(known.chart);
  };
  new ResizeObserver(() => resize(known)).observe(canvas);
  figures.set(key, known);
  return known;
}

function resize(known) {
  const width = known.canvas.clientWidth;
  if (known.chart && width > 0 && Math.abs(known.chart.width - width) > 1) known.chart.setSize({ width, height: height(width) });
}

// Where no pointer is, the legend has the newest value of each line.
function latest(chart) {
  if (!(chart.cursor.left >= 0)) chart.setLegend({ idxs: chart.data.map((column) => column.findLastIndex((v) => v != null)) });
}

function isSteep(lines) {
  const values = lines.flatMap((line) => line.points.map(([, y]) => y)).filter((y) => y != null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  return low > 0 && values.reduce((a, b) => Math.max(a, b), 0) > STEEP * low;
}

const height = (width) => (width < 480 ? 200 : 240);

function options(canvas, lines, x, { digits, limit, steep }) {
  const axisStyle = { stroke: () => color("--muted"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { stroke: () => color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
  const width = canvas.clientWidth || 560;
  const series = lines.map((line, at) => ({
    label: line.name, stroke: () => color(line.color ?? `--line-${at + 1}`), width: 2, spanGaps: true,
    points: { show: line.points.length < 40, size: 6, fill: () => color(line.color ?? `--line-${at + 1}`) },
    value: (_, v) => (v == null ? "–" : digits ? decimal(v, digits) : integer(v)),
  }));
  if (limit != null) series.push({ label: limit.name, stroke: () => color("--muted"), width: 1, dash: [6, 4], points: { show: false }, value: (_, v) => decimal(v, digits) });
  return {
    width, height: height(width), cursor: { y: false }, hooks: { setCursor: [latest] },
    legend: { live: true, markers: { fill: (chart, at) => chart.series[at].stroke(chart, at), width: 0 } },
    scales: { x: { time: false }, y: steep ? { distr: 3 } : digits ? {} : { range: (_, low, high) => [0, 1.1 * (high || 1)] } },
    axes: [
      { ...axisStyle, size: 38, values: (_, ticks) => ticks.map((v) => (v === 0 ? "0" : x.text(v))), space: 70 },
      { ...axisStyle, ...(steep ? { splits: tens } : {}), size: 62, values: (_, ticks) => ticks.map((v) => (v == null ? "" : digits ? v.toLocaleString("en", { maximumFractionDigits: 4 }) : short(v))) },
    ],
    series: [{ label: x.name, value: (_, v) => (v == null ? "–" : x.bare(v)) }, ...series],
  };
}

// The powers of ten within a range.
function tens(chart, axis, low, high) {
  const [from, to] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  return Array.from({ length: Math.max(0, to - from + 1) }, (_, at) => 10 ** (from + at));
}

// uPlot wants one column of x for all lines.
function aligned(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...lines.map((line) => {
    const column = new Array(xs.length).fill(undefined);
    line.points.forEach(([x, y]) => (column[at.get(x)] = y));
    return column;
  })];
}

function onlyPoint(line, x, digits) {
  const [[at, y]] = line.points;
  return `${line.name}: ${y == null ? "not finite" : digits ? decimal(y, digits) : integer(y)} at ${x.long(at)}.`;
}

function spoken(line, x, digits) {
  const whole = line.points.filter(([, y]) => y != null);
  if (!whole.length) return `${line.name}: no points.`;
  const text = (v) => (digits ? decimal(v, digits) : integer(v));
  const values = whole.map(([, y]) => y);
  const [first, last] = [whole[0], whole[whole.length - 1]];
  return `${line.name}: ${text(first[1])} at ${x.long(first[0])}, ${text(last[1])} at ${x.long(last[0])}, lowest ${text(Math.min(...values))}, highest ${text(Math.max(...values))}.`;
}

function pointTable(line, x, unit, digits) {
  const stride = Math.max(1, Math.ceil(line.points.length / TABLE_POINTS));
  const rows = line.points.filter((_, at) => (line.points.length - 1 - at) % stride === 0);
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": `Points of ${line.name}` }, h("table", h("caption", `${line.name}, ${rows.length} of ${line.points.length} points`),
    h("thead", h("tr", h("th", { scope: "col" }, x.name), h("th.num", { scope: "col" }, unit))),
    h("tbody", rows.map(([at, y]) => h("tr", h("th", { scope: "row" }, x.long(at)), h("td.num", y == null ? "not finite" : digits ? decimal(y, digits) : integer(y)))))));
}

// Points of a curve over an axis, without those of steps that were trained again.
export function points(curve, axis, name, from) {
  const [x, y] = [curve.columns.indexOf(axis), curve.columns.indexOf(name)];
  const kept = [];
  for (const row of [...curve.rows].reverse()) {
    const at = row[x] == null ? null : axis === "time" ? row[x] - from : row[x];
    if (at != null && (!kept.length || at < kept[kept.length - 1][0])) kept.push([at, row[y]]);
  }
  return kept.reverse();
}

export function redraw() {
  figures.forEach((known) => known.chart?.redraw(false));
}

