import { html, useRef, useState } from "../vendor/htm-preact-standalone.module.js";
import { ask, objects, usePoll } from "../api.js";
import { Chart } from "../chart.js";
import { Errors } from "../errors.js";
import { number, percent, seconds, short } from "../format.js";
import { Table } from "../table.js";
import { DECISION_COLUMNS } from "./decisions.js";

const PREFIX_COLUMNS = [
  { head: "last block", cell: (row) => html`<span class="id">${row.block}</span>` },
  { head: "blocks", number: true, sort: (row) => row.num_blocks, cell: (row) => number(row.num_blocks) },
  { head: "requests", number: true, sort: (row) => row.requests, cell: (row) => number(row.requests) },
];

function Drain({ name, draining }) {
  const dialog = useRef(null);
  const [said, setSaid] = useState("");
  const act = () => {
    dialog.current.close();
    ask("drain", { worker: name, undo: draining }).then(
      () => setSaid(draining ? "It gets requests again." : "It gets no more requests."),
      (problem) => setSaid(`Not done: ${problem.message}`),
    );
  };
  const [verb, what] = draining
    ? ["Undo drain", "It gets requests again at once."]
    : ["Drain", "It gets no more requests until it starts again or this is undone. Requests on it go on to their end."];
  return html`
    <button class="plain" type="button" onClick=${() => dialog.current.showModal()}>${verb}…</button>
    <span role="status" class="note">${said}</span>
    <dialog ref=${dialog} aria-label=${verb}>
      <h2>${verb} <span class="id">${name}</span>?</h2>
      <p>${what}</p>
      <form method="dialog"><button class="main" type="button" onClick=${act}>${verb}</button><button class="plain">Cancel</button></form>
    </dialog>
  `;
}

function Now({ row }) {
  const facts = {
    state: row.state,
    queue: seconds(row.queue_s),
    requests: `${number(row.requests)}${row.max_requests ? ` of ${number(row.max_requests)}` : ""}`,
    "last minute": `${number(row.ok)} answered, ${number(row.failed)} failed, ${number(row.left_before)} left waiting`,
    "last error": row.last_error,
    "KV in use": percent(row.kv_used, 0),
    "blocks held": `${short(row.device_blocks)} device, ${short(row.host_blocks)} host, ${short(row.disk_blocks)} disk`,
    worth: seconds(row.unique_value_s),
    GPU: percent(row.gpu_util, 0),
    trust: row.trust_cause ? `${row.trust}: ${row.trust_cause}` : row.trust,
    "hits foretold, reported": `${percent(row.predicted_hit, 0)}, ${percent(row.reported_hit, 0)}`,
    model: row.model,
    address: row.address,
  };
  return html`<dl class="facts">${Object.entries(facts).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="id-ish">${value ?? "–"}</dd></div>`)}</dl>`;
}

export function Worker({ id }) {
  const { data, error } = usePoll(`workers/${encodeURIComponent(id)}`, 2000);
  const back = html`<a href="#/workers">Workers</a>`;
  if (!data)
    return html`<section><div class="title">${back}<h2 class="id">${id}</h2></div><p class="empty">${error || "Loading…"}</p></section>`;
  const { worker, series, prefixes, decisions, errors } = data;
  return html`
    <section>
      <div class="title">${back}<h2 class="id">${worker.worker}</h2><${Drain} name=${worker.worker} draining=${worker.state === "draining"} /></div>
      ${error && html`<p class="bad">${error}</p>`}
      <${Now} row=${worker} />
    </section>
    <${Errors} errors=${errors} />
    <div class="two">
      <${Chart} title="Seconds queued, last hour" at=${series.at_s} from=${3600} text=${seconds} lines=${[{ label: "queue", tone: "c1", values: series.queue_s, fill: true }]} />
      <section>
        <div class="title"><h2>Hottest prefixes</h2><span class="note">of the last decisions for it</span></div>
        <${Table} label="Hottest prefixes" columns=${PREFIX_COLUMNS} rows=${objects(prefixes)} id=${(row) => row.block} initial="requests" empty="None is kept." />
      </section>
    </div>
    <section>
      <h2>Last decisions for it</h2>
      <${Table} label="Last decisions" columns=${DECISION_COLUMNS} rows=${objects(decisions)} id=${(row) => row.id} empty="None is kept." />
    </section>
  `;
}
