// What the page shows, and what it asks. Text of prompts is only ever set as text, never as markup.
import { Icicle, legend } from "./icicle.js";
import { KINDS, TIERS, Tree } from "./model.js";

const $ = (id) => document.getElementById(id);
const KEPT = 1200, SHOWN = 150;

const number = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
function bytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (size < 1024) return `${size.toFixed(size < 10 ? 1 : 0)} ${unit}`; size /= 1024; }
  return `${size.toFixed(1)} TiB`;
}
function time(seconds) {
  if (seconds === null || seconds === undefined) return "not recorded";
  return seconds < 120 ? `${seconds.toFixed(1)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
const short = (text, most = 18) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
function element(tag, text, ...inside) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  made.append(...inside);
  return made;
}

class Rank {
  constructor() { this.tree = new Tree(); this.samples = []; this.events = []; this.requests = []; this.running = []; this.error = ""; }
}
const ranks = [];
let shown = 0, paused = false, waiting = [], dirty = true, newEvents = true;
const now = () => ranks[shown] ?? new Rank();
const empty = new Tree();

// What the server tells.

function receive(message) {
  if (paused) { waiting.push(message); if (waiting.length > 2000) { waiting = []; connect(); } return; }
  while (ranks.length <= message.rank) {
    ranks.push(new Rank());
    $("rank").parentElement.hidden = ranks.length < 2;
    $("rank").replaceChildren(...ranks.map((_, rank) => Object.assign(element("option", String(rank)), { value: rank })));
  }
  const rank = ranks[message.rank];
  if (message.start) rank.tree.clear();
  rank.tree.drop(message.gone ?? []);
  const hit = rank.tree.take(message.nodes ?? [], !message.start && !message.more);
  if (message.running) rank.running = message.running;
  if (message.error !== undefined) rank.error = message.error;
  rank.samples.push(...(message.samples ?? []));
  rank.samples.splice(0, Math.max(0, rank.samples.length - KEPT));
  for (const event of message.events ?? []) {
    const list = event.event === "request" ? rank.requests : rank.events;
    list.push(event);
    if (list.length > SHOWN) list.shift();
    newEvents = true;
    if (event.event === "request" && event.hit && !(message.samples?.length > 1)) { // several: it tells of the past
      const node = rank.tree.nodes.get(event.path[0]);
      if (node) hit.push(node);
    }
  }
  if (message.rank === shown) {
    icicle.tree = rank.tree;
    icicle.running = rank.running;
    icicle.now = rank.samples.at(-1)?.clock ?? 0;
    if (hit.length) icicle.hit(hit);
    dirty = true;
  }
}

let source = null, answered = false;
function connect() {
  source?.close();
  source = new EventSource("changes");
  source.onopen = () => { answered = true; ranks.length = 0; waiting = []; }; // all is told anew, also where a browser connects again by itself
  source.onmessage = (event) => { receive(JSON.parse(event.data)); };
  source.onerror = async () => {
    $("state").textContent = "the server does not answer";
    if (source.readyState === EventSource.CLOSED) {
      const why = answered ? null : await fetch("changes").then((answer) => (answer.ok ? null : answer.json())).catch(() => null);
      $("state").textContent = why?.error ?? "the server does not answer";
      setTimeout(connect, 3000);
    }
  };
}

// The tree.

let asked = null;
const icicle = new Icicle($("tree"), empty, {
  point: (node) => { clearTimeout(asked); asked = setTimeout(() => tell(node), 60); },
  choose: (node) => tell(node),
});

async function tell(node) {
  const answer = await fetch(`nodes/${shown}/${node.id}`);
  const about = await answer.json();
  if (!about.id) { $("about").replaceChildren(element("p", about.gone ?? about.error)); return; }
  const rows = [
    ["node", about.id], ["tenant", about.tenant || "none"],
    ["tokens", `${number(about.begins)} to ${number(about.ends)}`],
    ["checkpoint", about.kind ? (KINDS[about.kind] ?? ["", about.kind])[1] : "none"],
    ["bytes", `${bytes(about.kv_bytes)} of KV${about.state_bytes ? `, ${bytes(about.state_bytes)} of state` : ""}`],
    ["where", `KV: ${TIERS[about.kv_tier] ?? "nowhere"}${about.kind ? `, state: ${TIERS[about.state_tier] ?? "nowhere"}` : ""}`],
    ["hits", number(about.hits)], ["unused for", time(about.unused)],
  ];
  if (about.kind) rows.push(["taken", `${time(about.age)} ago`], ["value", `${number(about.value)} FLOPs a byte`]);
  rows.push(["prefix hash", about.hash]);
  for (const [flag, what] of [["pinned", "pinned"], ["held", "held by a running request"]]) if (about[flag]) rows.push(["kept", what]);
  const list = element("dl", null, ...rows.flatMap(([name, value]) => [element("dt", name), element("dd", String(value))]));
  const parts = [list];
  if (about.kind) {
    const returns = about.returns === null ? `The policy ${about.policy} does not say how likely a return is.` : `A return is expected with ${percent(about.returns)}.`;
    parts.push(element("p", `Lost, a request that returns here computes ${number(about.ends - about.anchor)} tokens again, from ` +
      `${number(about.anchor)} on (${about.saves_flops.toExponential(2)} FLOPs). ${returns}`));
  }
  if (about.text) parts.push(element("h3", "Text of this edge"), element("pre", about.text));
  $("about").replaceChildren(...parts);
  $("about").dataset.node = about.id;
}

$("colour").addEventListener("change", () => { icicle.colour = $("colour").value; showLegend(); dirty = true; });
$("whole").addEventListener("click", () => icicle.zoom(null));
$("rank").addEventListener("change", () => { shown = Number($("rank").value); icicle.tree = now().tree; icicle.top = null; dirty = newEvents = true; });
$("find").addEventListener("input", () => {
  const wanted = $("find").value.trim().toLowerCase(), rank = now();
  icicle.found = new Set();
  if (wanted) {
    const of = rank.requests.filter((each) => each.request.toLowerCase().startsWith(wanted)).flatMap((each) => each.path);
    for (const node of rank.tree.nodes.values()) {
      if (String(node.id) === wanted || of.includes(node.id) || (KINDS[node.kind]?.[1] ?? "").includes(wanted) ||
          (node.parent === rank.tree.root && (node.tenant ?? "").startsWith(wanted) && node.tenant)) icicle.found.add(node);
    }
  }
  dirty = true;
});
function showLegend() {
  $("legend").replaceChildren(...legend(icicle.colour).map(([colour, name]) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 8 8"); svg.setAttribute("aria-hidden", "true");
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ width: 8, height: 8, rx: 1.5, fill: colour })) rect.setAttribute(key, value);
    svg.append(rect);
    return element("li", null, svg, name);
  }));
}

// Time.

// Title, unit, series, and of some: whether a server has what they show.
const CHARTS = [
  ["Hit rate", "%", [["hit", "#1d6fb8", (s, p) => rate(s, p, "hit_tokens")], ["hit, or stored without a state", "#e8a838", (s, p) => rate(s, p, "hit_tokens", "kv_only_tokens")]]],
  ["Tokens of prompts a second", "tokens/s", [["hit", "#1d6fb8", (s, p) => speed(s, p, (x) => x.hit_tokens)], ["stored without a state", "#e8a838", (s, p) => speed(s, p, (x) => x.kv_only_tokens)], ["not stored", "#b5b2aa", (s, p) => speed(s, p, (x) => x.prompt_tokens - x.hit_tokens - x.kv_only_tokens)]]],
  ["Memory of the device", "MiB", [["KV", "#5b8ff9", (s) => s.kv_bytes / 2 ** 20], ["states", "#c2410c", (s) => s.state_bytes / 2 ** 20], ["room for both", "#9a978f", (s) => (s.one_memory ? s.kv_room / 2 ** 20 : null)]], (s) => s.one_memory],
  ["Memory of the device", "MiB", [["KV", "#5b8ff9", (s) => s.kv_bytes / 2 ** 20], ["states", "#c2410c", (s) => s.state_bytes / 2 ** 20], ["room for KV", "#9a978f", (s) => s.kv_room / 2 ** 20], ["room for states", "#d8a08c", (s) => s.state_room / 2 ** 20]], (s) => !s.one_memory],
  ["Requests", "", [["running", "#2b8a3e", (s) => s.running], ["waiting", "#c2410c", (s) => s.waiting]]],
  ["Evictions a second", "", [["evictions", "#7b4fb5", (s, p) => speed(s, p, (x) => x.evicted)]]],
  ["Memory below the device", "MiB", [["host", "#e8a838", (s) => (s.tiers.host === undefined ? null : s.tiers.host / 2 ** 20)], ["device", "#5b8ff9", (s) => (s.tiers.device === undefined ? null : s.tiers.device / 2 ** 20)]], (s) => s.tiers.host !== undefined],
];
const rate = (s, p, ...names) => {
  const tokens = s.prompt_tokens - p.prompt_tokens;
  return tokens > 0 ? (100 * names.reduce((sum, name) => sum + s[name] - p[name], 0)) / tokens : null;
};
const speed = (s, p, of) => (s.time > p.time ? Math.max(0, of(s) - of(p)) / (s.time - p.time) : null);
const BACK = 10; // samples over which rates are taken

const GAP = 5; // seconds without a sample that are drawn as a gap
const at = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

const charts = CHARTS.map(([title, unit, series, there]) => {
  const nothing = Object.assign(element("p", "Nothing yet: a line begins with the first prompt."), { className: "nothing" });
  const box = element("div", null, element("h3", unit ? `${title} (${unit})` : title), nothing);
  box.className = "chart";
  $("charts").append(box);
  const soft = () => getComputedStyle(document.documentElement).getPropertyValue("--soft");
  const line = () => getComputedStyle(document.documentElement).getPropertyValue("--line");
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const plot = new uPlot({
    width: 320, height: 170, series: [{ value: (_, seconds) => (seconds ? at(seconds) : "") },
      ...series.map(([label, stroke]) => ({ label, stroke, width: 1.6, spanGaps: false, value: (_, v) => (v === null || v === undefined ? "" : v.toLocaleString("en", { maximumFractionDigits: 1 })) }))],
    axes: [{ ...axis, space: 75, values: (_, ticks) => ticks.map(at) }, { ...axis, size: 55 }],
    legend: { live: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high ?? 1) * 1.08] } },
  }, [[], ...series.map(() => [])], box);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", title);
  new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth), height: 170 })).observe(box);
  return { plot, series, title, there, box, nothing };
});

function until() { // samples up to the time that the slider stands at
  const samples = now().samples, share = Number($("scrub").value) / 1000;
  return share >= 1 ? samples : samples.slice(0, Math.max(2, Math.ceil(samples.length * share)));
}
function showTime() {
  const samples = until();
  const last = samples.at(-1), begun = samples.some((sample) => sample.requests > 0);
  const places = []; // of samples, and -1 in the middle of each gap
  samples.forEach((sample, place) => { if (place && sample.time - samples[place - 1].time > GAP) places.push(-1); places.push(place); });
  const times = places.map((place, i) => (place < 0 ? (samples[places[i - 1]].time + samples[places[i + 1]].time) / 2 : samples[place].time));
  const before = (place) => { // the sample that rates are taken from, on this side of a gap
    let first = place;
    while (first > 0 && place - first < BACK && samples[first].time - samples[first - 1].time <= GAP) first -= 1;
    return samples[first];
  };
  for (const { plot, series, title, there, box, nothing } of charts) {
    box.hidden = Boolean(there) && !(last && there(last));
    nothing.hidden = begun;
    plot.root.hidden = !begun;
    const data = series.map(([, , of]) => places.map((place) => (place < 0 ? null : of(samples[place], before(place)))));
    plot.setData([times, ...data]);
    plot.root.setAttribute("aria-label", `${title}: ${series.map(([label], i) => `${label} ${(data[i].at(-1) ?? 0).toFixed(1)}`).join(", ")}`);
  }
  $("scrub-at").textContent = Number($("scrub").value) >= 1000 || !last ? "now" : at(last.time);
  if (!last) return;
  const memory = last.one_memory ? [[`${bytes(last.kv_bytes + last.state_bytes)} of ${bytes(last.kv_room)}`, "of the memory is used"]]
    : [[`${bytes(last.kv_bytes)} of ${bytes(last.kv_room)}`, "of KV"], [`${bytes(last.state_bytes)} of ${bytes(last.state_room)}`, "of states"]];
  const hit = last.prompt_tokens ? [percent(last.hit_tokens / last.prompt_tokens), "of prompt tokens came from the cache"] : ["no prompt yet", "how much of prompts comes from the cache"];
  const tiles = [[number(last.requests), "requests"], hit, others(), [number(last.hit_tokens), "tokens not computed"], ...memory, [number(last.evicted), "evictions"],
    [last.policy, "is the eviction policy"]];
  $("numbers").replaceChildren(...tiles.map(([value, name]) => Object.assign(element("div", null, element("b", value), element("span", name)), { className: "number" })));
}
// What others would have had of the last requests: known once they were replayed.
let replayed = null;
function others() {
  if (replayed === null) return ["not known yet", "what SGLang's own policy would have: replay the last requests, below"];
  const share = (policy) => replayed.find((row) => row[0] === policy && row[1] === 1)?.[3];
  const ours = share(replayed[0][0]), lru = share("lru");
  return [percent(share("sglang")), `with SGLang's own policy on the last requests; ${percent(lru)} with LRU, ${percent(ours)} with ${replayed[0][0]}`];
}
$("scrub").addEventListener("input", () => { showTime(); showEvents(); });
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) { const kept = waiting; waiting = []; kept.forEach(receive); }
});

// What happened.

const WHY = { no_slot: "no slot was free and nothing could go", not_worth: "it was worth no more than what it would have pushed out", micro_branch: "it would have gained too few tokens" };
const SHORT = { shared: "the memory", states: "state slots", kv: "KV" };
function sentence(event) {
  if (event.event === "not taken") return [`${(KINDS[event.kind] ?? ["", event.kind])[1]} not taken`, number(event.position), `${WHY[event.why] ?? event.why} (request ${short(event.request)})`];
  if (event.what === "kv") return ["KV evicted", `${number(event.position)} to ${number(event.end)}`, "nothing resumed from it"];
  const worth = event.worth === null ? "a leaf, which goes first" : `worth ${Number(event.worth).toPrecision(3)} by ${event.policy}`;
  const to = event.for ? `; its slot went to the ${(KINDS[event.for[1]] ?? ["", event.for[1]])[1]} at ${number(event.for[2])} of ${short(event.for[0])}` : "";
  return [`${(KINDS[event.kind] ?? ["", event.kind])[1]} evicted`, number(event.position), `${worth}, ${number(event.hits)} hits, unused for ${time(event.unused)}${event.short ? `; ${SHORT[event.short]} ran short` : ""}${to}`];
}
// By the word of `missed` (docs/reports.md): why the hit was not longer, and what would make it so.
const MISSED = {
  nothing: ["all was hit that can be", ""],
  not_stored: ["not stored: new, or evicted", "More memory, if it was evicted: pick the request to see."],
  no_state: ["stored, but no state behind it", "A declared position where prompts part, or more state slots: pick the request to see."],
  no_slot: ["no free slot for the state", "--max-mamba-cache-size higher, or --max-running-requests lower."],
  grid: ["states lie on SGLang's grid", "--hybrid-admission judicious, where the flags of the server allow it."],
  computed: ["computing was faster than loading", ""],
  not_loaded: ["there was no room to load it", ""],
  changing_text: ["a short text before it changes", "Move it to the end of the prompt: pick the request to see which."],
};
const nothingIn = (rows, columns, text) => (rows.length ? rows : [element("tr", null, Object.assign(element("td", text), { colSpan: columns, className: "nothing" }))]);
function cell(name, content) {
  const made = element("td", null, content);
  made.dataset.name = name;
  return made;
}

function showEvents() {
  const rank = now(), sample = until().at(-1), last = sample?.clock ?? Infinity;
  const before = (event) => Number($("scrub").value) >= 1000 || event.at === null || event.at <= last;
  const when = (event) => (event.at === null || !rank.samples.length ? "" : at(rank.samples.at(-1).time - (rank.samples.at(-1).clock - event.at)));
  const events = rank.events.filter(before).reverse().map((event) => element("tr", null, cell("time", when(event)),
    ...sentence(event).map((text, i) => cell(["what", "position", "why"][i], String(text)))));
  $("events").replaceChildren(...nothingIn(events, 4, "Nothing yet: what is evicted will be here, and why it was that."));
  const requests = rank.requests.filter(before).reverse().map((event) => {
    const pick = element("button", short(event.request, 14));
    pick.type = "button";
    pick.addEventListener("click", () => ask({ request_id: event.request, tenant: event.tenant }));
    const [why, remedy] = MISSED[event.missed] ?? [event.missed.replace("_", " "), ""];
    const cells = [["route", event.route || "not by HTTP"], ["tenant", event.tenant ? short(event.tenant, 9) : "none"], ["tokens", number(event.prompt)], ["hit", number(event.hit)], ["why not more", why], ["what would help", remedy]];
    return element("tr", null, cell("time", when(event)), cell("request", pick), ...cells.map(([name, text]) => cell(name, text)));
  });
  $("requests").replaceChildren(...nothingIn(requests, 8, "No request yet: each will be here with what it hit, why not more, and what would help."));
}

// Questions.

let answers = [];
async function post(path, body) {
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? told.error ?? answer.statusText);
  return told;
}
async function ask(question) {
  try {
    const told = await post("ask", question);
    answers = [...answers.slice(-1), told];
    $("compare").disabled = answers.length < 2 || !answers.every((each) => each.tokens.length);
    if (told.rank !== shown) { shown = told.rank; $("rank").value = shown; icicle.tree = now().tree; }
    icicle.top = null;
    icicle.path = new Set(told.path);
    icicle.mark = [told.report.hit, told.path];
    const where = told.then_text ? `\n\nThe hit ends here:\n…${told.hit_text}⟦${told.then_text}⟧…` : "";
    $("answer").textContent = told.words.join("\n") + where;
    $("answer").dataset.hit = told.report.hit;
    icicle.draw();
  } catch (error) { $("answer").textContent = error.message; }
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value, question = {};
  try {
    const json = JSON.parse(text);
    if (Array.isArray(json) && json.length) question[typeof json[0] === "number" ? "input_ids" : "messages"] = json;
    else if (json.messages) question.messages = json.messages;
  } catch { /* text */ }
  if (!Object.keys(question).length) question.text = text;
  if ($("extra-key").value) question.extra_key = $("extra-key").value;
  if ($("cache-salt").value) question.cache_salt = $("cache-salt").value;
  ask(question);
});
$("compare").addEventListener("click", async () => {
  try {
    const [first, second] = answers;
    const told = await post("differ", { first: first.tokens, second: second.tokens });
    $("answer").textContent = `The two are equal up to token ${number(told.at)} of ${number(first.tokens.length)} and ${number(second.tokens.length)}.\n\n` +
      `both:   …${told.same}\nfirst:  ${told.first || "(it ends)"}\nsecond: ${told.second || "(it ends)"}`;
  } catch (error) { $("answer").textContent = error.message; }
});

let what = null;
$("what").addEventListener("click", () => replay("?begin=1"));
async function replay(how) {
  try {
    const told = (await post(`what_if${how}`, {}))[shown];
    $("what-told").textContent = told.told;
    $("what").disabled = told.state === "running";
    if (told.state === "running") setTimeout(() => replay(""), 1000);
    if (told.state === "done") { replayed = told.rows; showWhatIf(told.rows); showTime(); }
  } catch (error) { $("what-told").textContent = error.message; $("what").disabled = false; }
}
function showWhatIf(rows) {
  const body = $("what-rows").tBodies[0];
  $("what-rows").hidden = false;
  const name = ([, times, size]) => (times ? `${times} × (${bytes(size)})` : "without a bound");
  const policies = [...new Set(rows.map((row) => row[0]))], called = (policy) => (policy === "sglang" ? "SGLang's own" : policy);
  $("what-rows").tHead.rows[0].replaceChildren(...["memory", ...policies.map(called)].map((title) => element("th", title)));
  body.replaceChildren(...rows.filter((row) => row[0] === policies[0]).map((row) => element("tr", null, element("td", name(row)),
    ...policies.map((policy) => element("td", percent(rows.find((each) => each[0] === policy && each[1] === row[1])[3]))))));
  const sizes = [...new Set(rows.filter((row) => row[1]).map((row) => row[2]))].sort((a, b) => a - b);
  const colours = ["#1d6fb8", "#9a978f", "#c2410c"];
  $("what-chart").hidden = false;
  const at = (policy, size) => 100 * (rows.find((row) => row[0] === policy && row[2] === size)?.[3] ?? 0);
  what?.destroy();
  const soft = getComputedStyle(document.documentElement).getPropertyValue("--soft");
  what = new uPlot({
    width: Math.max(240, $("what-chart").clientWidth), height: 200, scales: { x: { time: false }, y: { range: [0, 100] } },
    series: [{ label: "GiB" }, ...policies.map((label, i) => ({ label: `${called(label)}, % hit`, stroke: colours[i], width: 2, points: { show: true } }))],
    axes: [{ stroke: soft }, { stroke: soft }],
  }, [sizes.map((size) => size / 2 ** 30), ...policies.map((policy) => sizes.map((size) => at(policy, size)))], $("what-chart"));
  what.root.setAttribute("role", "img");
  what.root.setAttribute("aria-label", "Hit rate by gigabytes; the table below has its numbers");
}

// Each frame draws what has changed since the one before.

function frame() {
  if (dirty || performance.now() < (icicle.litUntil ?? 0)) {
    dirty = false;
    icicle.draw();
  }
  requestAnimationFrame(frame);
}
setInterval(() => {
  const rank = now();
  if (!ranks.length || source.readyState !== EventSource.OPEN) return;
  const nodes = Math.max(0, rank.tree.nodes.size - 1);
  $("state").textContent = rank.error || `${paused ? "paused, " : ""}${nodes ? `${number(nodes)} stored pieces of prompts` : "the cache is empty: send a prompt"}, ${number(rank.running.length)} requests run`;
  $("tree-empty").hidden = nodes > 0;
  if (!paused) showTime();
  if (newEvents) { newEvents = false; showEvents(); }
}, 500);
showLegend();
showEvents();
connect();
frame();
window.hybrid = { ranks, icicle, receive }; // for tests and for whoever looks at the console
