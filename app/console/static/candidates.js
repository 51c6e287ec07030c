// What each worker would have cost, in the policy's terms.
import { html } from "./vendor/htm-preact-standalone.module.js";
import { Legend, Stack } from "./bars.js";
import { number, seconds } from "./format.js";
import { Table } from "./table.js";
import { workerLink } from "./views/workers.js";

const TONES = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "rest"];

const MOST_SAID = 3;

// Terms in seconds say so in their names; other policies count blocks, or nothing that has a unit.
const textOf = (terms) => (terms.every((term) => term.endsWith("_s")) ? seconds : (value) => number(value, 2));
const nameOf = (term) => term.replace(/_s$/, "").replaceAll("_", " ");

// candidates: [{worker, eligible, requests, overlap_blocks, cost, <term>…}], the cheapest first.
export function Candidates({ candidates, terms, worker, best }) {
  const text = textOf(terms);
  const counted = terms.filter((term) => candidates.some((row) => row[term]));
  const tone = Object.fromEntries(terms.map((term, at) => [term, TONES[at % TONES.length]]));
  const positive = (row) => terms.reduce((sum, term) => sum + Math.max(0, row[term] ?? 0), 0);
  const most = Math.max(0, ...candidates.map(positive));
  const parts = (row) =>
    counted.map((term) => ({ name: nameOf(term), tone: tone[term], value: row[term], text: text(row[term]) }));
  const said = (row) =>
    parts(row)
      .map((part) => `${part.name} ${part.text}`)
      .join(", ");
  const marks = (row) =>
    html`${row.worker === worker && html`<span class="tag">chosen</span>`}${row.worker === best && html`<span class="tag">held most</span>`}`;
  const columns = [
    { head: "worker", sort: (row) => row.worker, cell: (row) => html`${workerLink(row.worker)} ${marks(row)}` },
    {
      head: "price",
      number: true,
      sort: (row) => row.cost,
      cell: (row) => (row.eligible ? html`<b>${text(row.cost)}</b>` : "not allowed"),
    },
    {
      head: "made of",
      cell: (row) => html`<span class="long"><${Stack} parts=${parts(row)} most=${most} label=${said(row)} /></span>`,
    },
    { head: "held", number: true, sort: (row) => row.overlap_blocks, cell: (row) => number(row.overlap_blocks) },
    { head: "requests", number: true, sort: (row) => row.requests, cell: (row) => number(row.requests) },
    ...counted.map((term) => ({
      head: nameOf(term),
      number: true,
      sort: (row) => row[term],
      cell: (row) => text(row[term]),
    })),
  ];
  return html`
    <${Legend} parts=${counted.map((term) => ({ name: nameOf(term), tone: tone[term] }))} />
    <${Table} label="Candidates" columns=${columns} rows=${candidates} id=${(row) => row.worker} height=${560}
      tone=${(row) => (row.worker === worker ? "chosen" : row.eligible ? "" : "off")} />
  `;
}

// Why `worker` was cheaper than the one that held most, in one sentence; "" if they are the same.
export function whyNot({ candidates, terms, worker, best }) {
  const chosen = candidates.find((row) => row.worker === worker);
  const other = candidates.find((row) => row.worker === best);
  if (!chosen || !other || chosen === other) return "";
  if (!other.eligible) return `${best} held most, but was not allowed for this request.`;
  const text = textOf(terms);
  const apart = terms.map((term) => [term, (other[term] ?? 0) - (chosen[term] ?? 0)]).sort((a, b) => b[1] - a[1]);
  const [worse, better] = [apart.filter(([, d]) => d > 0), apart.filter(([, d]) => d < 0).reverse()];
  const list = (some) =>
    some
      .slice(0, MOST_SAID)
      .map(([term, d]) => `${text(Math.abs(d))} ${nameOf(term)}`)
      .join(", ");
  const gains = better.length ? `, though it would have saved ${list(better)}` : "";
  return `${best} held most, and would have cost ${text(other.cost - chosen.cost)} more: ${list(worse)} more${gains}.`;
}
