import { html, useMemo, useState } from "../vendor/htm-preact-standalone.module.js";
import { objects, usePoll } from "../api.js";
import { Bar, Stack } from "../bars.js";
import { number, seconds, share, short } from "../format.js";
import { Heat } from "../heat.js";
import { Table } from "../table.js";

export const workerLink = (name) =>
  html`<a class="id clip" title=${name} href=${`#/workers/${encodeURIComponent(name)}`}>${name}</a>`;

export const TIERS = [
  ["device", "c1"],
  ["host", "c5"],
  ["disk", "c7"],
];

function Blocks({ row, most }) {
  const parts = TIERS.map(([name, tone]) => ({
    name,
    tone,
    value: row[`${name}_blocks`],
    text: short(row[`${name}_blocks`]),
  }));
  return html`<${Stack} parts=${parts} most=${most} label=${parts.map((p) => `${p.name} ${p.text}`).join(", ")} />`;
}

const TONES = { serving: "", draining: "warn", away: "warn", trial: "warn", paused: "warn" };

const held = (row) =>
  row.device_blocks === null ? null : TIERS.reduce((sum, [name]) => sum + row[`${name}_blocks`], 0);
const most = (rows, of) => Math.max(0, ...rows.map((row) => of(row) ?? 0));

function columns(rows) {
  const queue = Math.max(
    1,
    most(rows, (row) => row.queue_s),
  );
  const value = most(rows, (row) => row.unique_value_s);
  const blocks = most(rows, held);
  const bar = (head, of, full, text, title) => ({
    head,
    title,
    number: true,
    sort: of,
    cell: (row) => html`<${Bar} value=${of(row)} most=${full} text=${text(of(row))} />`,
  });
  const plain = (head, of, text, title) => ({ head, title, number: true, sort: of, cell: (row) => text(of(row)) });
  return [
    { head: "worker", sort: (row) => row.worker, cell: (row) => workerLink(row.worker) },
    {
      head: "state",
      title: "The one in most trouble first: failing, ill, paused or gone",
      down: true,
      sort: (row) => row.trouble,
      cell: (row) => html`<span class=${TONES[row.state] ?? "bad"} title=${row.cause ?? ""}>${row.state}</span>`,
    },
    bar("queue", (row) => row.queue_s, queue, seconds, "Predicted seconds of prefill in line"),
    bar(
      "requests",
      (row) => row.requests,
      Math.max(
        8,
        most(rows, (row) => row.requests),
      ),
      number,
      "Reserved on it",
    ),
    plain("answered", (row) => row.ok, number, "In the last minute"),
    {
      ...plain("failed", (row) => row.failed, number, "Requests of the last minute that it failed"),
      cell: (row) => html`<span class=${row.failed ? "bad" : ""} title=${row.last_error ?? ""}>${number(row.failed)}</span>`,
    },
    plain("left", (row) => row.left_before, number, "Clients of the last minute that left before their first token"),
    plain("retried", (row) => row.retried, number, "Requests of the last minute that went on to another worker"),
    plain("tokens out", (row) => row.output, number, "In the last minute, as its engine counted them"),
    plain("sources", (row) => row.sources, number, "Requests of the last minute whose prompt it computed for another worker, or handed on"),
    plain("decoding", (row) => row.decoding, number, "Past their first token"),
    bar("KV in use", (row) => row.kv_used, 1, share, "Blocks of running requests, of all on its device"),
    {
      head: "blocks held",
      title: "By tier: device, host, disk",
      number: true,
      sort: held,
      cell: (row) => html`<span class="pair">${short(held(row))}<${Blocks} row=${row} most=${blocks} /></span>`,
    },
    bar(
      "worth",
      (row) => row.unique_value_s,
      value,
      seconds,
      "Seconds of recent prefills that would be done again without it",
    ),
    bar("GPU", (row) => row.gpu_util, 1, share, "As the device reports"),
    {
      head: "trust",
      title: "How far what is known of its cache can be relied on",
      sort: (row) => row.trust,
      cell: (row) =>
        html`<span class=${row.trust === "exact" ? "" : "warn"} title=${row.trust_cause ?? ""}>${row.trust}</span>`,
    },
    plain(
      "hits foretold",
      (row) => row.predicted_hit,
      share,
      "Share of prompt tokens in its cache, when it was chosen",
    ),
    plain("reported", (row) => row.reported_hit, share, "The same, as the engine counted it afterwards"),
  ];
}

export function Workers() {
  const { data, error } = usePoll("workers");
  const { data: history } = usePoll("history?window_s=3600", 5000);
  const [text, setText] = useState("");
  const all = useMemo(() => objects(data), [data]);
  const rows = useMemo(
    () => all.filter((row) => `${row.worker} ${row.model} ${row.state}`.includes(text)),
    [all, text],
  );
  const heads = useMemo(() => columns(all), [all]);
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  return html`
    <section>
      <div class="title"><h2>Seconds queued, by worker and time</h2></div>
      <${Heat} at_s=${history?.heat?.at_s} workers=${history?.heat?.workers} />
    </section>
    <section>
      <div class="title">
        <h2>${number(all.filter((row) => row.state !== "gone").length)} workers</h2>
        <label class="note">find <input type="search" value=${text} placeholder="id, model, state" onInput=${(e) => setText(e.target.value)} /></label>
      </div>
      <${Table} label="Workers" columns=${heads} rows=${rows} initial="state" id=${(row) => row.worker} empty="No worker is registered."
        tone=${(row) => (["serving", "away", "trial"].includes(row.state) ? "" : "off")} />
    </section>
  `;
}
