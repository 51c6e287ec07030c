import { html, useEffect, useState } from "../vendor/htm-preact-standalone.module.js";
import { ask } from "../api.js";
import { Candidates, whyNot } from "../candidates.js";
import { day, number, percent, seconds, sentence } from "../format.js";
import { workerLink } from "./workers.js";

const Fact = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

function Facts({ of }) {
  const { device, host, disk } = of.overlap;
  const total = device + host + disk;
  const share = (blocks) => (of.full_blocks ? ` = ${percent(blocks / of.full_blocks, 0)}` : "");
  return html`<dl class="facts">
    <${Fact} name="at">${day(of.at_ms)}</${Fact}>
    <${Fact} name="worker">${workerLink(of.worker)}</${Fact}>
    <${Fact} name="policy">${of.policy}</${Fact}>
    <${Fact} name="prompt">${number(of.isl_tokens)} tokens, ${number(of.full_blocks)} blocks</${Fact}>
    <${Fact} name="held there">${number(total)} blocks${share(total)}</${Fact}>
    <${Fact} name="of them">device ${number(device)}, host ${number(host)}, disk ${number(disk)}</${Fact}>
    <${Fact} name="most held">${of.best ? html`${number(of.best_overlap)} by ${workerLink(of.best)}` : "nobody held any"}</${Fact}>
    <${Fact} name="tries">${of.tries}</${Fact}>
    <${Fact} name="waited">${of.waited_ms ? seconds(of.waited_ms / 1000) : "not at all"}</${Fact}>
    ${of.trust && html`<${Fact} name="trust">${of.trust}</${Fact}>`}
    ${of.source && html`<${Fact} name="source">${of.source}</${Fact}>`}
  </dl>`;
}

export function Explanation({ id }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    ask(`explain/${encodeURIComponent(id)}`).then(setFound, (problem) => setError(problem.message));
  }, [id]);
  const back = html`<a href="#/decisions">Decisions</a>`;
  if (!found)
    return html`<section><div class="title">${back}<h2 class="id">${id}</h2></div><p class="empty">${error || "Loading…"}</p></section>`;
  return html`
    <section>
      <div class="title">${back}<h2>Why <span class="id">${found.request_id}</span> went to <span class="id">${found.worker}</span></h2></div>
      <p>${sentence(found.locality_text)} ${whyNot(found)}</p>
      <${Facts} of=${found} />
    </section>
    <section>
      <div class="title"><h2>What each worker would have cost</h2><span class="note">${number(found.candidates.length)} workers, the cheapest first</span></div>
      ${found.candidates.length ? html`<${Candidates} ...${found} />` : html`<p class="empty">The candidates of this decision were not kept: raise --details-per-s.</p>`}
    </section>
  `;
}
