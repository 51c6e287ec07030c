import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { ask, usePoll } from "../api.js";
import { number, percent, seconds } from "../format.js";
import { Table } from "../table.js";

const change = (were, wouldBe) =>
  were ? `${wouldBe >= were ? "+" : "−"}${percent(Math.abs(wouldBe / were - 1))}` : "–";

function Choices({ found }) {
  const rows = Object.entries(found.mean).map(([name, mean]) => ({ name, were: mean.were, wouldBe: mean["would be"] }));
  const columns = [
    { head: "mean", cell: (row) => row.name },
    { head: "were", number: true, cell: (row) => number(row.were, 3) },
    { head: "would be", number: true, cell: (row) => number(row.wouldBe, 3) },
    { head: "change", number: true, cell: (row) => change(row.were, row.wouldBe) },
  ];
  return html`<section>
    <h2>${number(found.changed)} of ${number(found.decisions)} decisions would have gone elsewhere</h2>
    <p class="note">Each decision on its own: how other choices would have changed later loads is not simulated.</p>
    <${Table} label="Differences" columns=${columns} rows=${rows} id=${(row) => row.name} />
  </section>`;
}

function Sizes({ found, now }) {
  const columns = [
    { head: "workers", number: true, cell: (row) => `${row.size}${row.size === now ? " (now)" : ""}` },
    { head: "requests", number: true, cell: (row) => number(row.requests) },
    { head: "within the SLO", number: true, cell: (row) => percent(row.attainment) },
    { head: "first token p99", number: true, cell: (row) => seconds(row.ttft_p99_s) },
    { head: "from cache", number: true, cell: (row) => percent(row.hit_rate) },
  ];
  return html`<section>
    <h2>The last minutes, played again in fleets of other sizes</h2>
    <${Table} label="Sizes" columns=${columns} rows=${found} id=${(row) => row.size} />
  </section>`;
}

export function WhatIf() {
  const { data, error: away } = usePoll("whatif", 10_000);
  const [{ policy, prefill_weight, workers }, setFields] = useState({ policy: "", prefill_weight: "", workers: "" });
  const [state, setState] = useState({});
  if (!data) return html`<p class="empty">${away || "Loading…"}</p>`;
  const set = (name) => (event) => setFields((fields) => ({ ...fields, [name]: event.target.value }));
  const submit = (event) => {
    event.preventDefault();
    const body = { policy: policy || data.policies[0] };
    if (prefill_weight && body.policy === "blocks") body.prefill_weight = Number(prefill_weight);
    if (workers) body.workers = Number(workers);
    setState({ busy: true });
    ask("whatif", body).then(
      (found) => setState({ found }),
      (problem) => setState({ error: problem.message }),
    );
  };
  return html`
    <section>
      <div class="title"><h2>What if another policy, or another number of workers, had decided</h2></div>
      <form onSubmit=${submit}>
        <label>Policy<select value=${policy || data.policies[0]} onChange=${set("policy")}>${data.policies.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
        <label>Prefill weight<input type="number" min="0" max="1000" step="any" value=${prefill_weight} disabled=${(policy || data.policies[0]) !== "blocks"} onInput=${set("prefill_weight")} /></label>
        <label>Workers<input type="number" min="1" max="1000" value=${workers} placeholder=${`${data.workers} now`} onInput=${set("workers")} /></label>
        <button class="main" disabled=${state.busy}>${state.busy ? "Working…" : "Try"}</button>
      </form>
      ${state.error && html`<p class="bad" role="alert">${state.error}</p>`}
    </section>
    ${state.found && (state.found.kind === "workers" ? html`<${Sizes} found=${state.found.sizes} now=${data.workers} />` : html`<${Choices} found=${state.found} />`)}
  `;
}
