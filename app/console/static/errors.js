// What requests failed of, in the words of engines.
import { html } from "./vendor/htm-preact-standalone.module.js";
import { objects } from "./api.js";
import { number, since } from "./format.js";
import { Table } from "./table.js";
import { workerLink } from "./views/workers.js";

const COLUMNS = [
  { head: "last", number: true, sort: (row) => row.last_ms, cell: (row) => since(row.last_ms) },
  { head: "first", number: true, sort: (row) => row.first_ms, cell: (row) => since(row.first_ms) },
  { head: "requests", number: true, sort: (row) => row.requests, cell: (row) => number(row.requests) },
  { head: "model", sort: (row) => row.model, cell: (row) => html`<span class="clip">${row.model || "–"}</span>` },
  { head: "worker", sort: (row) => row.worker, cell: (row) => (row.worker ? workerLink(row.worker) : "router") },
  { head: "cause", sort: (row) => row.cause, cell: (row) => row.cause },
  { head: "in its words", cell: (row) => html`<span class="words">${row.words || "–"}</span>` },
  { head: "one of them", cell: (row) => html`<span class="id clip" title=${row.request_id}>${row.request_id || "–"}</span>` },
];

export const Errors = ({ errors }) => html`<section>
  <div class="title"><h2>Last errors</h2><span class="note">the same ones together</span></div>
  <${Table} label="Last errors" columns=${COLUMNS} rows=${objects(errors)} initial="last"
    id=${(row) => `${row.first_ms} ${row.worker} ${row.cause} ${row.words}`} empty="No request failed lately." />
</section>`;
