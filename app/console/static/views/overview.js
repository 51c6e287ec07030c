import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { freshness, hasKey, objects, useHealth, usePoll } from "../api.js";
import { Legend, Stack } from "../bars.js";
import { Chart } from "../chart.js";
import { Errors } from "../errors.js";
import { age as aged, bytes, number, percent, seconds, sentence, short } from "../format.js";
import { ReuseSteps } from "../reuse_steps.js";
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

const Tile = ({ name, value, small, tone }) =>
  html`<div><dt>${name}</dt><dd><b class=${tone || ""} data-tile=${name}>${value}</b><small>${small}</small></dd></div>`;

function Tiles({ tiles, redis, replicas }) {
  const { stale } = useHealth(1000);
  const asked = tiles.requests_per_s + tiles.refused_per_s;
  const memory = redis.max_bytes ? `${bytes(redis.used_bytes)} of ${bytes(redis.max_bytes)}` : bytes(redis.used_bytes);
  return html`<dl class="tiles">
    <${Tile} name="requests a second" value=${number(tiles.requests_per_s, 1)} small=${`${number(tiles.output_tokens_per_s)} tokens out`} />
    <${Tile} name="failed" tone=${tiles.failed_share > 0.05 && "bad"} value=${percent(tiles.failed_share)} small=${`${number(tiles.failed_per_s, 1)}/s by engines, ${number(tiles.cut_per_s, 1)}/s cut`} />
    <${Tile} name="left waiting" tone=${tiles.left_before_per_s > 0.1 * asked && "bad"} value=${`${number(tiles.left_before_per_s, 1)}/s`} small=${`before a token; ${number(tiles.left_after_per_s, 1)}/s after it`} />
    <${Tile} name="refused" tone=${tiles.refused_per_s > 0.5 * asked && "bad"} value=${`${number(tiles.refused_per_s, 1)}/s`} small=${`by routers; ${number(tiles.unfit_per_s, 1)}/s by engines`} />
    <${Tile} name="first token in time" tone=${tiles.in_time_share !== null && tiles.in_time_share < 0.95 && "bad"} value=${percent(tiles.in_time_share)} small="within 5 s, of all that waited" />
    <${Tile} name="first token p50" value=${seconds(tiles.ttft_p50_s)} small=${`p99 ${seconds(tiles.ttft_p99_s)}`} />
    <${Tile} name="from cache" value=${percent(tiles.cached_share)} small=${`as engines say; ${percent(tiles.predicted_share, 0)} predicted`} />
    <${Tile} name="prefill saved" value=${tiles.saved_s_per_s === null ? "–" : `${number(tiles.saved_s_per_s, 2)} s/s`} small="by what engines had cached" />
    <${Tile} name="retries" value=${`${number(tiles.retries_per_s, 1)}/s`} small=${`${number(tiles.migrations_per_s, 1)}/s migrated, ${number(tiles.sources_per_s, 1)}/s split`} />
    <${Tile} name="decision p50" value=${seconds(tiles.decision_p50_s)} small=${`p99 ${seconds(tiles.decision_p99_s)}`} />
    <${Tile} name="waiting" value=${number(tiles.waiting)} small=${`queue of a worker ${seconds(tiles.queue_s)}`} />
    <${Tile} name="workers" value=${number(tiles.workers)} small=${tiles.draining ? `${tiles.draining} draining` : "in service"} />
    <${Tile} name="replicas" value=${number(replicas.rows.length)} small=${`${number(tiles.degraded_per_s, 1)}/s degraded`} />
    <${Tile} name="Redis" tone=${(stale || redis.used_bytes > 0.9 * (redis.max_bytes || Infinity)) && "bad"} value=${stale ? "away" : seconds(redis.rtt_s)} small=${`${memory}, ${redis.version ?? ""}`} />
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

// Conditions say in a sentence what checks say of what they are named after.
const Finding = ({ name, detail, remedy, level }) => html`<li class=${level}>
  <p>${name.startsWith("Kvroute") ? html`<b>${detail}.</b> <span class="note">${name}</span>` : html`<b>${name}:</b> ${detail}`}</p>
  ${remedy && html`<p class="note">→ ${sentence(remedy)}</p>`}
</li>`;

const isWrong = ({ level }) => level === "bad" || level === "warn";

function Findings({ findings }) {
  const { age, kind } = freshness(useHealth(1000));
  const wrong = findings.filter(isWrong);
  const fine = findings.filter(({ ok }) => ok).length;
  return html`<section aria-live="polite">
    <h2>${kind ? `What was wrong ${aged(age)} ago` : "What is wrong now"}</h2>
    <ul class="findings">
      ${wrong.length === 0 && html`<li class="fine"><p>Nothing: ${number(fine)} checks pass.</p></li>`}
      ${wrong.map((finding) => html`<${Finding} key=${finding.name} ...${finding} />`)}
    </ul>
  </section>`;
}

const ENDINGS = [
  ["ok_per_s", "answered", "c1"],
  ["failed_per_s", "failed", "c6"],
  ["cut_per_s", "cut", "c2"],
  ["left_before_per_s", "left waiting", "c3"],
  ["refused_per_s", "refused", "c4"],
];
const WORK = [
  ["output_tokens_per_s", "tokens out", "c1"],
];
const REPAIR = [
  ["retries_per_s", "retries", "c2"],
  ["migrations_per_s", "migrations", "c3"],
  ["sources_per_s", "sources", "c5"],
];
const lines = (series, names) =>
  names.filter(([name]) => series[name]).map(([name, label, tone]) => ({ label, tone, values: series[name] }));

function Curves({ marks }) {
  const [window_s, setWindow] = useState(300);
  const { data } = usePoll(`history?window_s=${window_s}`, HISTORY_MS);
  if (!data) return null;
  const { at_s, series } = data;
  return html`<div class="two">
    <${Chart} title="Requests a second" at=${at_s} from=${window_s} marks=${marks} lines=${lines(series, ENDINGS)}>
      <label class="note">last <select value=${window_s} onChange=${(e) => setWindow(Number(e.target.value))}>
        <option value="300">5 minutes</option><option value="3600">hour</option><option value="86400">day</option>
      </select></label>
    </${Chart}>
    <${Chart} title="First token" at=${at_s} from=${window_s} marks=${marks} text=${seconds}
      lines=${[
        { label: "p50", tone: "c1", values: series.ttft_p50_s },
        { label: "p99", tone: "c2", values: series.ttft_p99_s },
      ]} />
    <${Chart} title="Tokens out a second" at=${at_s} from=${window_s} marks=${marks} lines=${lines(series, WORK)} />
    <${Chart} title="Seconds queued" at=${at_s} from=${window_s} marks=${marks} text=${seconds} lines=${lines(series, [["queue_s", "mean of workers", "c1"]])} />
    <${Chart} title="Tried again a second" at=${at_s} from=${window_s} marks=${marks} lines=${lines(series, REPAIR)} />
  </div>`;
}

const count = (head, name, title) => ({ head, title, number: true, sort: (row) => row[name], cell: (row) => number(row[name]) });
const MODELS = [
  { head: "model", sort: (row) => row.model, cell: (row) => html`<span class="clip">${row.model || "(not known)"}</span>` },
  { head: "failed", number: true, sort: (row) => row.failed_share, cell: (row) => html`<span class=${row.failed_share > 0.05 ? "bad" : ""}>${percent(row.failed_share)}</span>` },
  count("answered", "ok", "To the end"),
  count("by engines", "engine", "Engines answered with an error, or not at all"),
  count("cut", "cut", "Answers that broke off"),
  count("left waiting", "left_before", "Clients that left before their first token"),
  count("left later", "left_after", "Clients that left after their first token"),
  count("unfit", "unfit", "Engines took them for the request's own fault"),
  count("refused", "refused", "By routers"),
  { head: "first token", number: true, sort: (row) => row.ttft_mean_s, cell: (row) => seconds(row.ttft_mean_s) },
  { head: "queue", title: "Mean of its workers", number: true, sort: (row) => row.queue_s, cell: (row) => seconds(row.queue_s) },
  count("tokens out", "output", "As engines counted them, or routers, of answers that broke off or were left"),
  count("retries", "retries", "On another worker, before the answer began"),
  count("migrations", "migrations", "On another worker, within the answer"),
  count("sources", "sources", "Requests whose prompt another worker computed or handed on"),
];

const Models = ({ models }) => html`<section>
  <div class="title"><h2>Models</h2><span class="note">requests and tokens of the last minute</span></div>
  <${Table} label="Models" columns=${MODELS} rows=${objects(models)} id=${(row) => row.model} empty="No request in the last minute." />
</section>`;

const ENGINE = "http:" + "//127.0.0.1:8000";
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The lines that make the first numbers come.
function Beginning({ namespace }) {
  const { data } = usePoll("workers");
  const worker = objects(data)[0];
  const chat = { model: worker?.model ?? "MODEL", messages: [{ role: "user", content: "hi" }] };
  const key = hasKey() ? ' -H "authorization: Bearer $KEY"' : "";
  const curl = `curl ${location.origin}/v1/chat/completions${key} -H 'content-type: application/json' -d ${quoted(JSON.stringify(chat))}`;
  return html`<section>
    <h2>${worker ? "No request yet: this sends the first one" : "No worker yet"}</h2>
    ${!worker && html`<p>This adds one, beside vLLM or SGLang, with REDIS_URL as this router has it:</p><p><code>kvroute agent --namespace ${namespace} --engine-url ${ENGINE}</code></p><p>And this sends a first request:</p>`}
    <p><code>${curl}</code></p>
  </section>`;
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
  const { data: reuse } = usePoll("funnel", HISTORY_MS);
  const { data: events } = usePoll("events", HISTORY_MS);
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  const errors = html`<${Errors} errors=${data.errors} />`;
  const isIll = data.findings.some(isWrong) && data.errors.rows.length > 0;
  return html`
    ${reuse && !reuse.models[""] && !data.models.rows.length && html`<${Beginning} namespace=${data.namespace} />`}
    <${Findings} findings=${data.findings} />
    ${isIll && errors}
    <${Tiles} ...${data} />
    ${!isIll && errors}
    <${Models} models=${data.models} />
    <${Curves} marks=${events?.events} />
    <div class="two">
      <section>
        <div class="title"><h2>Where reuse is lost</h2><a class="note" href="#/reuse">by model and cause</a></div>
        <${ReuseSteps} counts=${reuse?.models[""] ?? {}} />
      </section>
      <${WhyNot} localities=${data.localities} />
    </div>
    <${Replicas} replicas=${data.replicas} />
  `;
}
