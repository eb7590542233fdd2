// Draws what /cluster/events says. Whatever comes from there is set as text, never as HTML.
"use strict";

const BLOCKS = ["active", "exported", "importing", "draining", "cached", "free", "leaked"];
const OUTCOMES = ["settled", "cancelled", "expired", "refused", "aborted", "broken", "failed", "lost"];
const LATENCIES = { ttft: "Time to first token", tpot: "Time per output token", handoff: "Handoff" };
const KEY = "kvferry-key";
const RATE_OVER = 5; // seconds that a rate is measured over
const DRAWN = 120; // points of a rate's line
const MINUTE = 60;
const SILENT = 4; // seconds after which what is shown counts as old
const FIRST_PAUSE = 1000, LONGEST_PAUSE = 10000; // milliseconds between two tries to connect

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const natural = new Intl.Collator("en", { numeric: true });
const told = []; // the last snapshots, as far back as rates are measured, the oldest first
const minute = []; // the latencies of the last minute, the oldest first
const lines = {}; // what is drawn of each rate
let over = "all"; // which requests the latencies are of
let heard = 0; // when the last snapshot came, by this tab's clock
let reading = null; // ends the request that is under way
let connected = false;

const svg = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

// Children of `parent`, one for each item by its key: made once, put in order, and those of no item taken away.
function keyed(parent, items, key, create, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    let child = before.get(key(item));
    if (!child) {
      child = create(item);
      child.dataset.key = key(item);
    }
    before.delete(key(item));
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] || null);
    update(child, item);
  });
  for (const child of before.values()) child.remove();
}

function seconds(value) {
  if (value === null) return "-";
  if (value < 0.001) return `${number.format(value * 1e6)} µs`;
  return value < 1 ? `${number.format(value * 1e3)} ms` : `${number.format(value)} s`;
}

function span(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].map(([unit, name], at, all) =>
    [Math.floor((at ? value % all[at - 1][0] : value) / unit), name]);
  const first = parts.findIndex(([count]) => count);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map(([count, name]) => `${count} ${name}`).join(" ");
}

const rounded = (value) => (value === null ? "-" : value >= 100 ? number.format(Math.round(value)) : number.format(value));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const ended = (snapshot) => sum(Object.values(snapshot.totals.ended).map((codes) => sum(Object.values(codes))));

// A worker's counters are as old as its last heartbeat, so their time is that one's.
function workerRate(now, worker, field) {
  const beat = (snapshot, seen) => snapshot.uptime_s - seen.last_seen_s;
  for (const before of told) {
    if (before === now) break;
    const known = before.workers.find((each) => each.name === worker.name && each.incarnation === worker.incarnation);
    const passed = known ? beat(now, worker) - beat(before, known) : 0;
    if (passed > 0.1) return (worker.load[field] - known.load[field]) / passed;
  }
  return null;
}

function routerRate(now, counted) {
  const before = told[0];
  return before === now ? null : (counted(now) - counted(before)) / (now.uptime_s - before.uptime_s);
}

function drawRate(name, value) {
  const tile = document.querySelector(`[data-rate=${name}]`);
  const line = (lines[name] ??= []);
  line.push(value);
  if (line.length > DRAWN) line.shift();
  write(tile.querySelector("b"), rounded(value));
  const known = line.filter((each) => each !== null);
  const most = Math.max(...known, 1e-9);
  const from = DRAWN - line.length;
  const points = line.map((each, at) => (each === null ? null : `${from + at},${38 - (34 * each) / most}`)).filter(Boolean);
  const drawing = tile.querySelector("svg");
  drawing.setAttribute("viewBox", `0 0 ${DRAWN - 1} 40`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", known.length ? `the last two minutes; most: ${rounded(most > 1e-9 ? most : 0)}` : "nothing yet");
  if (points.length < 2) return drawing.replaceChildren();
  const last = points.at(-1).split(",")[0], first = points[0].split(",")[0];
  drawing.replaceChildren(
    svg("path", { class: "under", d: `M${first},40L${points.join("L")}L${last},40Z` }),
    svg("path", { d: `M${points.join("L")}` }),
  );
}

function makeCard(worker) {
  const card = make("article", { class: "card", "data-worker": worker.name },
    make("header", {}, make("h3"), make("span", { class: "state" }), make("span", { class: "where" })),
    make("div", { class: "pool", role: "img" }), make("ul", { class: "blocks" }), make("dl"));
  card.querySelector(".pool").append(...BLOCKS.map((block) => make("i", { "data-block": block })));
  return card;
}

function drawCard(card, now, worker) {
  const { load } = worker, { pool } = load, prefills = worker.role === "prefill";
  const blocks = { ...pool, leaked: Math.abs(worker.leaked_blocks) };
  card.dataset.state = worker.state;
  write(card.querySelector("h3"), worker.name);
  write(card.querySelector(".state"), worker.state);
  write(card.querySelector(".where"), worker.device);
  const shown = BLOCKS.filter((block) => blocks[block] || block === "free");
  const bar = card.querySelector(".pool");
  for (const part of bar.children) {
    const count = blocks[part.dataset.block];
    part.hidden = !count;
    part.style.flexGrow = count;
  }
  bar.setAttribute("aria-label", `blocks: ${shown.map((block) => `${blocks[block]} ${block}`).join(", ")}`);
  keyed(card.querySelector(".blocks"), shown, (block) => block,
    (block) => make("li", { "data-block": block }, make("b"), ` ${block}`),
    (item, block) => write(item.querySelector("b"), number.format(blocks[block])));
  const facts = {
    running: load.running,
    waiting: load.waiting,
    [prefills ? "leases open" : "imports open"]: worker.handoffs.open,
    [prefills ? "prompt tokens/s" : "tokens/s"]: rounded(workerRate(now, worker, prefills ? "prefill_tokens" : "decode_tokens")),
    "KV MB/s": rounded(perMillion(workerRate(now, worker, "kv_bytes"))),
    "last heard of": worker.last_seen_s < 1 ? "now" : `${span(worker.last_seen_s)} ago`,
  };
  keyed(card.querySelector("dl"), Object.entries(facts), ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd", { "data-fact": name })),
    (item, [, value]) => write(item.querySelector("dd"), value));
}

const perMillion = (value) => (value === null ? null : value / 1e6);

function drawBank(now, role) {
  const workers = now.workers.filter((each) => each.role === role).sort((one, other) => natural.compare(one.name, other.name));
  const live = known(workers).length;
  write(byId(`n-${role}`), live === workers.length ? `${live} live` : `${live} of ${workers.length} live`);
  const cards = workers.length ? workers : [null];
  keyed(byId(role), cards, (worker) => (worker ? worker.name : ""),
    (worker) => (worker ? makeCard(worker) : make("p", { class: "empty" }, `No ${role} worker has been heard of.`)),
    (card, worker) => worker && drawCard(card, now, worker));
  return workers;
}

// Of a lost worker nobody knows what it has now.
const known = (workers) => workers.filter((each) => each.state !== "lost");

function drawCrossing(now, prefill, decode, moving) {
  const fields = {
    leases: sum(known(prefill).map((each) => each.handoffs.open)),
    imports: sum(known(decode).map((each) => each.handoffs.open)),
    draining: sum(known(now.workers).map((each) => each.handoffs.draining)),
    handoffs: now.totals.handoffs,
    live_requests: now.live_requests,
    ...now.requests,
  };
  for (const [name, value] of Object.entries(fields)) write(document.querySelector(`[data-field=${name}]`), number.format(value));
  byId("crossing").classList.toggle("moving", moving > 0);
  const used = {};
  for (const worker of prefill) {
    for (const [scheme, use] of Object.entries(worker.handoffs.transports)) used[scheme] = (used[scheme] || 0) + use.ships;
  }
  keyed(byId("transports"), Object.keys(used).filter((scheme) => used[scheme]).sort(), (scheme) => scheme,
    (scheme) => make("li", {}, make("b"), ` ships by ${scheme}`),
    (item, scheme) => write(item.querySelector("b"), number.format(used[scheme])));
}

// As Prometheus estimates it.
function quantile(bounds, counts, share) {
  const wanted = share * sum(counts);
  if (!wanted) return null;
  let reached = 0;
  for (let at = 0; at < bounds.length; at++) {
    reached += counts[at];
    const low = at ? bounds[at - 1] : 0;
    if (reached >= wanted) return low + (bounds[at] - low) * (1 - (reached - wanted) / counts[at]);
  }
  return bounds.at(-1);
}

function drawLatencies(now) {
  const before = over === "minute" ? minute[0].latency : null;
  keyed(byId("latency"), Object.keys(LATENCIES), (name) => name,
    (name) => make("figure", { class: "chart", "data-latency": name },
      make("figcaption", {}, LATENCIES[name], make("small")), make("p"),
      make("div", { class: "bars", role: "img" }), make("div", { class: "bounds", "aria-hidden": "true" })),
    (chart, name) => {
      const { bounds, counts: all } = now.latency[name];
      const counts = all.map((count, at) => count - (before ? before[name].counts[at] : 0));
      const total = sum(counts), most = Math.max(...counts, 1);
      write(chart.querySelector("small"), `${number.format(total)} ${name === "handoff" ? "handoff" : "request"}${total === 1 ? "" : "s"}`);
      keyed(chart.querySelector("p"), [50, 90, 99], String, (share) => make("span", {}, `p${share} `, make("b", { "data-share": share })),
        (item, share) => write(item.querySelector("b"), seconds(quantile(bounds, counts, share / 100))));
      const label = (at) => (at < bounds.length ? `up to ${seconds(bounds[at])}` : `over ${seconds(bounds.at(-1))}`);
      keyed(chart.querySelector(".bars"), counts.map((_, at) => at), String, () => make("i"), (bar, at) => {
        bar.style.height = `${(100 * counts[at]) / most}%`;
        bar.title = `${label(at)}: ${number.format(counts[at])}`;
      });
      chart.querySelector(".bars").setAttribute("aria-label",
        counts.map((count, at) => count && `${label(at)}: ${count}`).filter(Boolean).join(", ") || "none");
      keyed(chart.querySelector(".bounds"), [0, bounds.length >> 1, bounds.length - 1].map((at) => bounds[at]), String,
        (bound) => make("span", {}, seconds(bound)), () => {});
    });
}

function drawTable(table, heads, rows) {
  keyed(table.tHead, [heads], String, () => make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head))), () => {});
  keyed(table.tBodies[0], rows, ([name]) => name, () => make("tr"), (row, cells) =>
    keyed(row, cells.map((cell, at) => [heads[at], cell]), ([head]) => head,
      ([head]) => (head === heads[0] ? make("th", { scope: "row" }) : make("td", { "data-column": head })),
      (cell, [, value]) => {
        write(cell, typeof value === "number" ? number.format(value) : value);
        cell.classList.toggle("none", value === 0);
      }));
}

function drawTables(now) {
  drawTable(byId("handoffs"), ["worker", "", "open", "draining", "opened", ...OUTCOMES], now.workers.map((worker) => {
    const { open, draining, opened, ended: outcomes } = worker.handoffs;
    const side = worker.role === "prefill" ? "leases" : "imports";
    return [worker.name, side, open, draining, opened, ...OUTCOMES.map((outcome) => outcomes[outcome] || 0)];
  }));
  const rows = Object.entries(now.totals.ended).flatMap(([outcome, codes]) =>
    Object.entries(codes).map(([code, count]) => [outcome === "cancelled" ? outcome : `${outcome}: ${code}`, count]));
  const retries = Object.entries(now.totals.retries).map(([code, count]) => [`tried again: ${code}`, count]);
  drawTable(byId("ended"), ["since start", "requests"], [...rows, ...retries].length ? [...rows, ...retries] : [["none yet", 0]]);
}

function drawClasses(now) {
  byId("queue").hidden = !now.classes.length;
  const promised = (value) => (value ? seconds(value) : "-");
  // Of those that finished, as many kept each target.
  const share = (each, target) => {
    const kept = each.kept[target] || 0, all = kept + (each.missed[target] || 0);
    return all ? `${number.format((100 * kept) / all)} %` : "-";
  };
  drawTable(byId("classes"), ["class", "waiting", "admitted", "refused", "TTFT", "TTFT kept", "TPOT", "TPOT kept"], now.classes.map((each) =>
    [each.name, each.waiting, each.admitted, sum(Object.values(each.refused)), promised(each.ttft_s), share(each, "ttft"), promised(each.tpot_s), share(each, "tpot")]));
}

function draw(now) {
  byId("ask").hidden = true;
  byId("told").hidden = false;
  write(byId("about"), `${now.model} · ${now.router} · policy ${now.policy} · up ${span(now.uptime_s)}`);
  document.title = `${now.alerts.length ? `▲ ${now.alerts.length} · ` : ""}${now.router} · kvferry`;
  const alerts = now.alerts.length ? now.alerts : [{ text: "No lost worker, no open breaker, no leaked block." }];
  keyed(byId("alerts"), alerts, (alert) => `${alert.kind} ${alert.worker}`, () => make("li"), (item, alert) => {
    write(item, alert.text);
    if (alert.kind) item.dataset.kind = alert.kind;
  });
  const [prefill, decode] = ["prefill", "decode"].map((role) => drawBank(now, role));
  const shipped = prefill.map((worker) => workerRate(now, worker, "kv_bytes")).filter((rate) => rate !== null);
  const moving = shipped.length ? sum(shipped) : null;
  drawCrossing(now, prefill, decode, moving);
  drawRate("requests", routerRate(now, ended));
  drawRate("prompt", routerRate(now, (each) => each.totals.prompt_tokens));
  drawRate("output", routerRate(now, (each) => each.totals.output_tokens));
  drawRate("kv", perMillion(moving));
  drawClasses(now);
  drawLatencies(now);
  drawTables(now);
}

function take(snapshot) {
  const last = told.at(-1);
  // Another router, or another life of this one, counts from 0.
  if (last && (last.router !== snapshot.router || last.uptime_s > snapshot.uptime_s)) forget();
  told.push(snapshot);
  minute.push({ uptime_s: snapshot.uptime_s, latency: snapshot.latency });
  while (snapshot.uptime_s - told[0].uptime_s > RATE_OVER) told.shift();
  while (snapshot.uptime_s - minute[0].uptime_s > MINUTE) minute.shift();
  heard = performance.now();
  link("live", "live");
  draw(snapshot);
}

function forget() {
  told.length = minute.length = 0;
  for (const name of Object.keys(lines)) delete lines[name];
}

function link(state, text) {
  byId("link").dataset.state = state;
  write(byId("link"), text);
  byId("told").classList.toggle("stale", state === "lost");
}

async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (!events.length) continue;
    const snapshot = JSON.parse(events.at(-1).slice("data: ".length));
    if (snapshot.error) throw new Error(snapshot.error.message);
    // Apart from here: a fault in drawing is none of the connection.
    queueMicrotask(() => take(snapshot));
  }
}

function ask(text) {
  sessionStorage.removeItem(KEY);
  forget();
  byId("told").hidden = true;
  byId("ask").hidden = false;
  document.title = "kvferry";
  write(byId("about"), "");
  write(byId("refused"), text);
  link("wait", "waiting for a key");
  byId("key").focus();
}

// Until a key is wanted, or nobody looks.
async function watch() {
  reading?.abort();
  const mine = (reading = new AbortController());
  for (let pause = FIRST_PAUSE; ; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    let why = "no answer from the router";
    try {
      const answer = await fetch("cluster/events", { headers, cache: "no-store", signal: mine.signal });
      if (answer.status === 401) return ask(key ? "The router does not know this key." : "");
      if (answer.ok) {
        pause = FIRST_PAUSE;
        connected = true;
        await read(answer);
        why = "the router has ended the stream";
      } else {
        why = answer.status === 429 ? "too many are watching" : `the router answers ${answer.status}`;
      }
    } catch (error) {
      if (mine.signal.aborted) return;
    }
    connected = false;
    link("lost", `${why}; trying again`);
    await new Promise((resume) => setTimeout(resume, pause));
    if (mine.signal.aborted) return;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  // Anything else could not be sent as a header.
  if (!/^[\x21-\x7e]+$/.test(key)) return ask("This is no key.");
  sessionStorage.setItem(KEY, key);
  watch();
});

document.querySelector(".choice").addEventListener("click", (event) => {
  over = event.target.dataset.window || over;
  for (const button of document.querySelectorAll("[data-window]")) button.setAttribute("aria-pressed", button.dataset.window === over);
  if (told.length) drawLatencies(told.at(-1));
});

document.addEventListener("visibilitychange", () => {
  if (!byId("ask").hidden) return;
  if (document.hidden) reading.abort();
  else watch();
});

setInterval(() => {
  const silence = (performance.now() - heard) / 1000;
  if (connected && told.length && silence > SILENT) link("lost", `nothing heard for ${span(silence)}`);
}, 1000);

watch();
