// The page: holds the state, follows its changes, and draws the sections again that changed.
import { age, jobClock, percent, stamp } from "./format.js";
import { h } from "./dom.js";
import { redraw } from "./plots.js";
import * as draw from "./sections.js";

const SECTIONS = {
  warnings: [["warnings", "overview"], (run) => draw.warnings(run)],
  overview: [["overview", "bytes"], (run) => draw.overview(run)],
  convergence: [["curves"], (run) => draw.convergence(run, view, between?.note)],
  steps: [["steps", "dense"], (run) => draw.steps(run)],
  tables: [["tables"], (run) => draw.tables(run)],
  bytes: [["bytes"], (run) => draw.byteKinds(run)],
  staleness: [["staleness"], (run) => draw.staleness(run)],
  members: [["members", "timeline"], (run) => draw.members(run, view)],
  checkpoints: [["checkpoints"], (run) => draw.checkpoints(run)],
  config: [["config"], (run) => draw.config(run)],
};
const ANNOUNCE_MS = 10_000;
const RETRY_MS = 3_000;
const $ = (id) => document.getElementById(id);

let runs = [];
let between = null; // what compares them
let shown = 0;
let stream = null;
const announced = new Set();
let spoken = 0;
let missed = false; // whether the tab was hidden at the last change

const view = {
  axis: "samples",
  choose(axis) {
    view.axis = axis;
    render(["curves"]);
  },
  logButton(role, index) {
    const embedded = stored?.logs?.[shown];
    if (stored && !embedded?.[`${role}-${index}`]) return "–";
    return h("button.small", { type: "button", "data-key": `log ${role} ${index}`, "aria-label": `Log of ${role} ${index}`, onclick: () => showLog(role, index) }, "log");
  },
};

// A tab that nobody sees keeps its title and speaks its warnings; it draws the rest when it is seen again.
function render(changed) {
  const run = runs[shown];
  if (!run) return;
  header(run);
  announce(run);
  missed = document.hidden;
  if (missed) return;
  document.body.classList.remove("waiting");
  keepingPlace(() => {
    for (const [id, [needs, content]] of Object.entries(SECTIONS)) {
      if (!changed || needs.some((name) => changed.includes(name))) $(id).querySelector(".body").replaceChildren(...content(run).flat(3).filter(Boolean));
    }
    const several = runs.length > 1;
    $("compare").hidden = $("to-compare").hidden = !several;
    if (several && (!changed || changed.some((name) => ["overview", "curves", "compare"].includes(name)))) $("compare").querySelector(".body").replaceChildren(...draw.compare(runs, view, between).flat(3).filter(Boolean));
  });
  tick();
}

document.addEventListener("visibilitychange", () => {
  if (missed) render();
});

// A drawing must not take the focus or the place of a scrolled box away.
function keepingPlace(work) {
  const focus = document.activeElement?.dataset?.key;
  const places = [...document.querySelectorAll("[data-key]")].filter((e) => e.scrollLeft || e.scrollTop).map((e) => [e.dataset.key, e.scrollLeft, e.scrollTop]);
  work();
  const find = (key) => document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  for (const [key, left, top] of places) find(key)?.scrollTo(left, top);
  if (focus && document.activeElement?.dataset?.key !== focus) find(focus)?.focus({ preventScroll: true });
}

function header(run) {
  const o = run.overview;
  const share = o.total_steps && o.step != null ? o.step / o.total_steps : null;
  $("name").textContent = run.name;
  $("state").textContent = o.state === "gone" ? "no process left" : o.state;
  $("state").className = `badge ${o.state}`;
  $("message").textContent = !o.message || run.warnings.some((w) => w.text.includes(o.message)) ? "" : `${draw.ended(run) ? "Ended: " : ""}${o.message}`;
  document.title = `${share != null && !draw.ended(run) ? `${percent(share)} ` : ""}${o.state}: ${run.name}`;
  const choice = $("runs");
  choice.parentElement.hidden = runs.length < 2;
  if (choice.options.length !== runs.length) choice.replaceChildren(...runs.map((one, at) => h("option", { value: at, selected: at === shown }, one.name)));
}

// New warnings are spoken once, not again when only their numbers change, and not more often than each ten seconds.
function announce(run) {
  const kind = (w) => `${shown} ${w.text.replace(/[\d.,]+/g, "#")}`;
  const fresh = run.warnings.filter((w) => w.level !== "note" && !announced.has(kind(w)));
  if (!fresh.length || Date.now() - spoken < ANNOUNCE_MS) return;
  spoken = Date.now();
  fresh.forEach((w) => announced.add(kind(w)));
  $("announce").textContent = fresh.map((w) => w.text).join(". ");
}

function tick() {
  document.querySelectorAll("time[data-at]").forEach((e) => (e.textContent = age(jobClock.now() - Number(e.dataset.at))));
}

function change({ run, sections, at, compared }) {
  between = compared ?? between;
  jobClock.ahead = at - Date.now() / 1000;
  for (const [name, value] of Object.entries(sections)) {
    if (name === "curves") grow(runs[run].curves, value);
    else runs[run][name] = value;
  }
  if (run === shown) render(Object.keys(sections));
  else render(["compare"]);
}

// Of a curve only the rows behind the first `keep` are sent.
function grow(curves, value) {
  for (const name of ["training", "evaluation"]) value[name].rows = [...curves[name].rows.slice(0, value[name].keep), ...value[name].rows];
  Object.assign(curves, value);
}

function whole(state) {
  jobClock.ahead = state.at - Date.now() / 1000;
  const same = runs.length === state.runs.length;
  runs = state.runs;
  between = state.compared;
  shown = same ? shown : 0;
  render();
}

function follow() {
  stream = new EventSource("events");
  stream.addEventListener("state", (event) => {
    connection("live", "live");
    whole(JSON.parse(event.data));
  });
  stream.addEventListener("change", (event) => change(JSON.parse(event.data)));
  stream.onerror = () => {
    const over = runs.length && runs.every(draw.ended);
    connection("lost", over ? "the job has ended; this is its last state" : "no connection, trying again");
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, RETRY_MS); // refused, not lost: it does not try again
  };
}

function connection(kind, text) {
  $("connection").className = kind;
  $("connection").textContent = text;
}

async function showLog(role, index) {
  const dialog = $("log");
  const text = dialog.querySelector("pre");
  dialog.querySelector("h2").textContent = `Log of ${role} ${index}`;
  const load = async () => {
    if (stored) {
      text.textContent = stored.logs[shown][`${role}-${index}`];
    } else {
      const reply = await fetch(`logs/${role}-${index}?run=${shown}`).catch(() => null);
      text.textContent = reply === null ? "The job does not answer." : reply.ok ? await reply.text() : reply.status === 404 ? "This process has no log in the run folder." : `The log cannot be read (${reply.status}).`;
    }
    text.scrollTop = text.scrollHeight;
  };
  dialog.querySelector(".again").hidden = Boolean(stored);
  dialog.querySelector(".again").onclick = load;
  text.textContent = "loading";
  dialog.showModal();
  await load();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").value = name;
  redraw();
}

function remembered(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch {
    return null; // a browser that keeps nothing
  }
}

const stored = $("stored") ? JSON.parse($("stored").textContent) : null;
theme(remembered("shardkeep theme") ?? "auto");
$("theme").addEventListener("change", (event) => {
  remembered("shardkeep theme", event.target.value);
  theme(event.target.value);
});
["(prefers-color-scheme: dark)", "print"].forEach((query) => matchMedia(query).addEventListener("change", redraw));
$("runs").addEventListener("change", (event) => {
  shown = Number(event.target.value);
  render();
});
$("log").querySelector(".close").addEventListener("click", () => $("log").close());
setInterval(tick, 1000);
if (stored) {
  jobClock.stopped = stored.at;
  connection("saved", `as of ${stamp(stored.at)}`);
  whole(stored);
} else {
  follow();
}
