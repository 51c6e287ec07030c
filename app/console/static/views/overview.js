import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { objects, usePoll } from "../api.js";
import { Legend, Stack } from "../bars.js";
import { Chart } from "../chart.js";
import { bytes, number, percent, seconds, short } from "../format.js";
import { Funnel } from "../funnel.js";
import { Table } from "../table.js";

const HISTORY_MS = 5000;
// Of the longest overlap: what became of it, in the order of the words' names in the API.
export const REASONS = {
  kept: ["c1", "it was chosen"],
  none: ["rest", "nobody held any of it"],
  tie: ["c5", "another was as cheap"],
  load: ["c2", "another was cheaper, with its load"],
  session: ["c3", "the session was elsewhere"],
  full: ["c6", "it was full"],
  excluded: ["c4", "the request excluded it"],
  lease: ["c7", "its lease had lapsed"],
  degraded: ["c6", "Redis was away"],
};

const Tile = ({ name, value, small }) =>
  html`<div><dt>${name}</dt><dd><b data-tile=${name}>${value}</b><small>${small}</small></dd></div>`;

function Tiles({ tiles, redis, replicas }) {
  const memory = redis.max_bytes ? `${bytes(redis.used_bytes)} of ${bytes(redis.max_bytes)}` : bytes(redis.used_bytes);
  return html`<dl class="tiles">
    <${Tile} name="requests a second" value=${number(tiles.requests_per_s, 1)} small=${`${number(tiles.refused_per_s, 1)} refused`} />
    <${Tile} name="from cache" value=${percent(tiles.cached_share)} small="of prompt tokens" />
    <${Tile} name="prefill saved" value=${`${number(tiles.saved_s_per_s, 2)} s/s`} small="by reading it from caches" />
    <${Tile} name="first token p50" value=${seconds(tiles.ttft_p50_s)} small=${`p99 ${seconds(tiles.ttft_p99_s)}`} />
    <${Tile} name="decision p50" value=${seconds(tiles.decision_p50_s)} small=${`p99 ${seconds(tiles.decision_p99_s)}`} />
    <${Tile} name="waiting" value=${number(tiles.waiting)} small="for a worker with room" />
    <${Tile} name="workers" value=${number(tiles.workers)} small=${tiles.draining ? `${tiles.draining} draining` : "in service"} />
    <${Tile} name="replicas" value=${number(replicas.rows.length)} small=${`${number(tiles.degraded_per_s, 1)}/s degraded`} />
    <${Tile} name="Redis" value=${seconds(redis.rtt_s)} small=${`${memory}, ${redis.version ?? ""}`} />
  </dl>`;
}

function WhyNot({ localities }) {
  const all = Object.values(localities).reduce((sum, count) => sum + count, 0);
  const parts = Object.entries(REASONS)
    .filter(([name]) => localities[name])
    .map(([name, [tone, text]]) => ({
      name: text,
      tone,
      value: localities[name],
      text: percent(localities[name] / all),
    }));
  return html`<section>
    <div class="title"><h2>Why not the worker that held most</h2><span class="note">last ${short(all)} decisions</span></div>
    ${all ? html`<${Stack} parts=${parts} most=${all} label=${parts.map((p) => `${p.name} ${p.text}`).join(", ")} /><${Legend} parts=${parts} />` : html`<p class="empty">No decision yet.</p>`}
  </section>`;
}

export function Findings({ findings }) {
  const wrong = findings.filter(({ level }) => level === "bad" || level === "warn");
  const fine = findings.filter(({ ok }) => ok).length;
  return html`<section aria-live="polite">
    <h2>What is wrong now</h2>
    <ul class="findings">
      ${wrong.length === 0 && html`<li class="fine"><p>Nothing: ${number(fine)} checks pass.</p></li>`}
      ${wrong.map(
        ({ name, detail, remedy, level }) => html`<li key=${name} class=${level}>
          <p><b>${name}</b> ${detail}</p>${remedy && html`<p class="note">→ ${remedy}</p>`}
        </li>`,
      )}
    </ul>
  </section>`;
}

function Curves({ marks }) {
  const [window_s, setWindow] = useState(3600);
  const { data } = usePoll(`history?window_s=${window_s}`, HISTORY_MS);
  if (!data) return null;
  const { at_s, series } = data;
  return html`<div class="two">
    <${Chart} title="Requests a second" at=${at_s} marks=${marks} lines=${[{ label: "requests/s", tone: "c1", values: series.requests_per_s, fill: true }]}>
      <label class="note">last <select value=${window_s} onChange=${(e) => setWindow(Number(e.target.value))}>
        <option value="3600">hour</option><option value="86400">day</option>
      </select></label>
    </${Chart}>
    <${Chart} title="First token" at=${at_s} marks=${marks} text=${seconds}
      lines=${[
        { label: "p50", tone: "c1", values: series.ttft_p50_s },
        { label: "p99", tone: "c2", values: series.ttft_p99_s },
      ]} />
  </div>`;
}

const REPLICAS = [
  { head: "replica", cell: (row) => html`<span class="id">${row.replica}</span>` },
  { head: "address", cell: (row) => html`<span class="id">${row.address}</span>` },
  { head: "version", cell: (row) => row.version },
  { head: "up", number: true, cell: (row) => seconds(row.uptime_s) },
  { head: "decisions/s", number: true, cell: (row) => number(row.decisions_per_s, 1) },
  { head: "decision p99", number: true, cell: (row) => seconds(row.decision_p99_s) },
  { head: "Redis p99", number: true, cell: (row) => seconds(row.redis_p99_s) },
  { head: "degraded/s", number: true, cell: (row) => number(row.degraded_per_s, 1) },
  { head: "waiting", number: true, cell: (row) => number(row.waiting) },
  { head: "last heard of", number: true, cell: (row) => html`${seconds(row.age_s)} ago` },
];

const Replicas = ({ replicas }) =>
  html`<section>
    <h2>Router replicas</h2>
    <${Table} label="Replicas" columns=${REPLICAS} rows=${objects(replicas)} id=${(row) => row.replica} />
  </section>`;

export function Overview() {
  const { data, error } = usePoll("overview");
  const { data: funnel } = usePoll("funnel", HISTORY_MS);
  const { data: events } = usePoll("events", HISTORY_MS);
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  return html`
    <${Tiles} ...${data} />
    <div class="two">
      <section>
        <div class="title"><h2>Where reuse is lost</h2><a class="note" href="#/reuse">by model and cause</a></div>
        <${Funnel} counts=${funnel?.models[""] ?? {}} />
      </section>
      <div class="column"><${Findings} findings=${data.findings} /><${WhyNot} localities=${data.localities} /></div>
    </div>
    <${Curves} marks=${events?.events} />
    <${Replicas} replicas=${data.replicas} />
  `;
}
