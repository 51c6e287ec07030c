import { html } from "../vendor/htm-preact-standalone.module.js";
import { objects, usePoll } from "../api.js";
import { Spark } from "../bars.js";
import { number, seconds, share, short } from "../format.js";
import { Table } from "../table.js";

const count = (head, of, text = number, title) => ({ head, title, number: true, sort: of, cell: (row) => text(of(row)) });
const COLUMNS = [
  { head: "key", sort: (row) => row.key, cell: (row) => html`<span class="clip">${row.key}</span>` },
  count("now", (row) => row.recent, number, "requests in this hour and the last"),
  count("requests", (row) => row.requests),
  count("prompt tokens", (row) => row.prompt_tokens, short),
  count("cached", (row) => row.cached_share, share, "of the prompt tokens"),
  count("output tokens", (row) => row.output_tokens, short),
  count("waited", (row) => row.waited_ms / 1000, seconds, "for a worker that could take them, all together"),
  count("refused", (row) => row.refused, number, "by the router"),
  count("failed", (row) => row.failed, number, "by engines"),
  count("counted here", (row) => row.by_router, number, "requests whose tokens the router counted, as their engine did not tell"),
  { head: "by hour", cell: (row) => html`<${Spark} values=${row.hours} label=${`tokens by hour: ${row.hours.join(", ")}`} />` },
];

export function Usage() {
  const { data, error } = usePoll("usage", 5000);
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  return html`<section>
    <div class="title"><h2>Who uses what</h2><span class="note">in the last 24 hours; a request without a key counts for its tenant, or as anonymous</span></div>
    <${Table} label="Usage" columns=${COLUMNS} rows=${objects(data)} id=${(row) => row.key} initial="prompt tokens" empty="No request has ended." />
  </section>`;
}
