import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { usePoll } from "../api.js";
import { Chart } from "../chart.js";
import { day, number } from "../format.js";
import { Table } from "../table.js";

const COLUMNS = [
  { head: "at", cell: (event) => day(event.at_ms) },
  { head: "kind", cell: (event) => html`<span class="tag">${event.kind}</span>` },
  { head: "of", cell: (event) => html`<span class="id clip">${event.subject}</span>` },
  { head: "what", cell: (event) => event.text },
];

export function Events() {
  const { data, error } = usePoll("events", 2000);
  const { data: history } = usePoll("history?window_s=3600", 5000);
  const [kind, setKind] = useState("");
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  const kinds = [...new Set(data.events.map((event) => event.kind))].sort();
  const shown = data.events.filter((event) => !kind || event.kind === kind);
  return html`
    ${
      history &&
      html`<${Chart} title="Workers in service, and events, last hour" at=${history.at_s} from=${3600} marks=${shown} height=${130}
      lines=${[{ label: "workers", tone: "c1", values: history.series.workers, fill: true }]} />`
    }
    <section>
      <div class="title">
        <h2>${number(shown.length)} events</h2>
        <label class="note">kind <select value=${kind} onChange=${(e) => setKind(e.target.value)}>
          <option value="">all</option>${kinds.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
      </div>
      <${Table} label="Events" columns=${COLUMNS} rows=${shown} id=${(event) => event.id} height=${640} empty="Nothing has happened yet."
        tone=${(event) => event.level ?? ""} />
    </section>
  `;
}
