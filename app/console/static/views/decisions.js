import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { objects, usePoll } from "../api.js";
import { Bar } from "../bars.js";
import { clock, number, percent, seconds } from "../format.js";
import { Table } from "../table.js";
import { REASONS } from "./overview.js";
import { workerLink } from "./workers.js";

const KEPT = 500;

const reuse = (row) => (row.full_blocks ? row.overlap_blocks / row.full_blocks : 0);

const explained = (id) =>
  html`<a class="id clip" title=${id} href=${`#/decisions/${encodeURIComponent(id)}`}>${id}</a>`;

export const DECISION_COLUMNS = [
  { head: "at", cell: (row) => clock(row.at_ms) },
  { head: "request", cell: (row) => explained(row.request_id) },
  { head: "worker", cell: (row) => workerLink(row.worker) },
  {
    head: "why",
    cell: (row) =>
      html`<span class="why"><i class=${REASONS[row.locality]?.[0] ?? "rest"} aria-hidden="true"></i>${row.locality}</span>`,
  },
  { head: "prompt", number: true, cell: (row) => number(row.isl_tokens) },
  {
    head: "held there",
    number: true,
    cell: (row) => html`<${Bar} value=${reuse(row)} most=${1} text=${percent(reuse(row), 0)} />`,
  },
  {
    head: "most held",
    number: true,
    cell: (row) =>
      row.best_blocks > row.overlap_blocks
        ? html`${percent(row.best_blocks / row.full_blocks, 0)} ${workerLink(row.best_worker)}`
        : "–",
  },
  { head: "waited", number: true, cell: (row) => (row.waited_ms ? seconds(row.waited_ms / 1000) : "–") },
  { head: "tries", number: true, cell: (row) => row.tries },
  { head: "model", of: (row) => row.model, cell: (row) => html`<span class="clip">${row.model || "–"}</span>` },
  { head: "tenant", of: (row) => row.tenant, cell: (row) => html`<span class="clip">${row.tenant || "–"}</span>` },
  { head: "trust", of: (row) => row.trust, cell: (row) => row.trust },
];

// The newest rows of all answers so far, at most KEPT of them.
function useTail(filters) {
  const path = `decisions?${new URLSearchParams(Object.entries(filters).filter(([, value]) => value))}`;
  return usePoll(path, 1500, (answer, data) => ({
    rows: [...objects(answer), ...(data?.rows ?? [])].slice(0, KEPT),
    next: `${path}&after=${answer.last}`,
  }));
}

function Search() {
  const [id, setId] = useState("");
  const open = (event) => {
    event.preventDefault();
    location.hash = `#/decisions/${encodeURIComponent(id.trim())}`;
  };
  return html`<form onSubmit=${open} role="search">
    <label>Request id<input required value=${id} onInput=${(e) => setId(e.target.value)} /></label>
    <button class="plain">Explain</button>
  </form>`;
}

export function Decisions() {
  const [filters, setFilters] = useState({});
  const [held, setHeld] = useState(null);
  const { data, error } = useTail(filters);
  const set = (name) => (event) => setFilters({ ...filters, [name]: event.target.value });
  const text = (name, label) =>
    html`<label>${label}<input value=${filters[name] ?? ""} onChange=${set(name)} /></label>`;
  const rows = data?.rows ?? [];
  const shown = held ?? rows;
  return html`<section>
    <div class="title"><h2>Decisions</h2><span class="note">the last ${number(shown.length)}, newest first</span></div>
    <div class="filters">
      <label>Why<select value=${filters.reason ?? ""} onChange=${set("reason")}>
        <option value="">any reason</option>${Object.keys(REASONS).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
      ${text("worker", "Worker")} ${text("model", "Model")} ${text("tenant", "Tenant")}
      <button class="plain" type="button" aria-pressed=${held !== null} onClick=${() => setHeld(held ? null : rows)}>${held ? "Resume" : "Pause"}</button>
      <${Search} />
    </div>
    <${Table} label="Decisions" columns=${DECISION_COLUMNS} rows=${shown} id=${(row) => row.id} height=${640} empty=${error || "No decision matches yet."} />
  </section>`;
}
