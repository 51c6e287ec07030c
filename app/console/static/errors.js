// What requests failed of, in the words of engines.
import { html } from "./vendor/htm-preact-standalone.module.js";
import { objects } from "./api.js";
import { number, since } from "./format.js";
import { Table } from "./table.js";
import { workerLink } from "./views/workers.js";

const RECENT_MS = 60_000;
const weight = (row) => row.requests + (Date.now() - row.last_ms < RECENT_MS ? 1e9 : 0);

const COLUMNS = [
  { head: "requests", title: "Those of the last minute first", number: true, sort: weight, cell: (row) => number(row.requests) },
  { head: "in its words", cell: (row) => html`<span class="words">${row.words || row.cause}</span>` },
  { head: "worker", sort: (row) => row.worker, cell: (row) => (row.worker ? workerLink(row.worker) : "router") },
  { head: "model", sort: (row) => row.model, cell: (row) => html`<span class="clip">${row.model || "–"}</span>` },
  { head: "cause", sort: (row) => row.cause, cell: (row) => row.cause },
  { head: "since", number: true, sort: (row) => row.first_ms, cell: (row) => since(row.first_ms) },
  { head: "last", number: true, sort: (row) => row.last_ms, cell: (row) => since(row.last_ms) },
  { head: "one of them", cell: (row) => html`<span class="id clip" title=${row.request_id}>${row.request_id || "–"}</span>` },
];

export const Errors = ({ errors }) => html`<section>
  <div class="title"><h2>Last errors</h2><span class="note">the same ones together</span></div>
  <${Table} label="Last errors" columns=${COLUMNS} rows=${objects(errors)} initial="requests"
    id=${(row) => `${row.first_ms} ${row.worker} ${row.cause} ${row.words}`} empty="No request failed lately." />
</section>`;
