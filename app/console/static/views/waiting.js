import { html } from "../vendor/htm-preact-standalone.module.js";
import { objects, usePoll } from "../api.js";
import { Bar } from "../bars.js";
import { number, seconds } from "../format.js";
import { Table } from "../table.js";

const FLOWS = (flows) => {
  const most = Math.max(1, ...flows.map((flow) => flow.requests));
  return [
    { head: "turn", cell: (flow) => flow.turn },
    { head: "tenant", cell: (flow) => html`<span class="clip">${flow.tenant || "(none)"}</span>` },
    { head: "priority", cell: (flow) => flow.priority },
    {
      head: "requests",
      number: true,
      sort: (flow) => flow.requests,
      cell: (flow) => html`<${Bar} value=${flow.requests} most=${most} text=${number(flow.requests)} />`,
    },
    { head: "oldest", number: true, sort: (flow) => flow.oldest_s, cell: (flow) => seconds(flow.oldest_s) },
  ];
};
const LIMITS = [
  { head: "key", cell: (limit) => html`<span class="clip">${limit.key}</span>` },
  { head: "limit", cell: (limit) => limit.limit },
  {
    head: "used",
    number: true,
    sort: (limit) => limit.used / limit.most,
    cell: (limit) =>
      html`<${Bar} value=${limit.used} most=${limit.most} text=${`${number(limit.used)} of ${number(limit.most)}`} />`,
  },
];

export function Waiting() {
  const { data, error } = usePoll("waiting");
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  const flows = objects(data.flows).map((flow, at) => ({ ...flow, turn: at + 1 }));
  const all = flows.reduce((sum, flow) => sum + flow.requests, 0);
  return html`
    <section>
      <div class="title"><h2>${number(all)} requests wait</h2><span class="note">in the order of turns</span></div>
      <${Table} label="Waiting" columns=${FLOWS(flows)} rows=${flows} id=${(flow) => `${flow.priority} ${flow.tenant}`} empty="Nobody waits: each request finds a worker with room." />
    </section>
    <section>
      <h2>Limits</h2>
      <${Table} label="Limits" columns=${LIMITS} rows=${objects(data.limits)} id=${(limit) => `${limit.key} ${limit.limit}`} initial="used" empty="No limit is set for any key." />
    </section>
  `;
}
