import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { askRouter } from "../api.js";
import { Legend, Stack } from "../bars.js";
import { Candidates, whyNot } from "../candidates.js";
import { number, percent, sentence } from "../format.js";
import { TIERS, workerLink } from "./workers.js";

const MAX_HOLDERS = 100;
const FORMS = {
  chat: { label: "Chat", hint: "A chat: the body of a request or its messages as JSON, or text, whose lines may begin with system:, user: or assistant:" },
  text: { label: "Text", hint: "Text of a prompt, as a completion would send it" },
  token_ids: { label: "Token ids", hint: "Token ids: a JSON list, or numbers apart by spaces" },
};

const words = (text) => text.split(/[\s,[\]"]+/).filter(Boolean);
const ROLE = /^(system|user|assistant):[ \t]*/m;

// The messages of a chat as people paste it.
function chat(text) {
  try {
    const read = JSON.parse(text);
    if (typeof read === "object") {
      const { messages = [], model, tools } = Array.isArray(read) ? { messages: read } : read;
      return { messages, ...(model && { model }), ...(tools && { tools }) };
    }
  } catch {
    // It is no JSON, so it is plain text.
  }
  const [first, ...rest] = text.trim().split(ROLE);
  const messages = first || !rest.length ? [{ role: "user", content: first.trim() }] : [];
  for (let at = 0; at < rest.length; at += 2) messages.push({ role: rest[at], content: rest[at + 1].trim() });
  return { messages };
}

// What /v1/route is asked; an engine of the model makes the ids of what has none.
const READ = {
  chat: async (text, model) => tokenized({ ...(model && { model }), ...chat(text) }),
  text: async (text, model) => tokenized({ ...(model && { model }), prompt: text }),
  token_ids: async (text) => words(text).map(Number),
};

const tokenized = async (asked) => (await askRouter("tokenize", asked)).tokens;

// An answer of /v1/route as the page shows it: the cheapest candidate first.
function shown(found) {
  const candidates = found.candidates.map((one) => ({
    ...one.terms,
    ...one.overlap_blocks,
    worker: `${one.worker_id}:${one.dp_rank}`,
    eligible: one.eligible,
    requests: one.active_requests,
    overlap_blocks: TIERS.reduce((sum, [name]) => sum + one.overlap_blocks[name], 0),
    cost: one.cost,
  }));
  candidates.sort((a, b) => (a.cost ?? Infinity) - (b.cost ?? Infinity));
  const terms = Object.keys(found.candidates[0]?.terms ?? {});
  const worker = `${found.worker_id}:${found.dp_rank}`;
  return { ...found, candidates, terms, worker, best: found.best_overlap.worker };
}

function Holders({ found }) {
  const holders = found.candidates.filter((row) => row.overlap_blocks).sort((a, b) => b.overlap_blocks - a.overlap_blocks);
  const { isl_blocks } = found;
  if (!holders.length) return html`<p class="empty">No worker holds its first block.</p>`;
  return html`<${Legend} parts=${TIERS.map(([name, tone]) => ({ name, tone }))} /><div class="holders">
    ${holders.slice(0, MAX_HOLDERS).map((row) => {
      const parts = TIERS.map(([name, tone]) => ({
        name,
        tone,
        value: row[name],
        text: `${number(row[name])} blocks`,
      }));
      const said = parts.map((part) => `${part.name} ${part.text}`).join(", ");
      return html`<span key=${row.worker}>${workerLink(row.worker)}</span><${Stack} parts=${parts} most=${isl_blocks} label=${said} />
        <span class="number">${number(row.overlap_blocks)} = ${percent(row.overlap_blocks / isl_blocks, 0)}</span>`;
    })}
    ${holders.length > MAX_HOLDERS && html`<p class="note">and ${number(holders.length - MAX_HOLDERS)} more</p>`}
  </div>`;
}

const Route = ({ found }) => html`<section>
    <div class="title"><h2>Where it would go now: <span class="id">${found.worker}</span></h2><span class="note">a dry run: nothing is reserved</span></div>
    <p>${sentence(found.locality.replaceAll("_", " "))} ${whyNot(found)}</p>
    <${Candidates} ...${found} />
  </section>`;

export function Prefix() {
  const [form, setForm] = useState("chat");
  const [{ text, model, lora_name }, setFields] = useState({ text: "", model: "", lora_name: "" });
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const set = (name) => (event) => setFields((fields) => ({ ...fields, [name]: event.target.value }));
  const submit = (event) => {
    event.preventDefault();
    setError("");
    READ[form](text, model)
      .then((token_ids) => askRouter("v1/route", { token_ids, reserve: false, explain: true, ...(lora_name && { lora_name }) }))
      .then(
        (found) => setFound(shown(found)),
        (problem) => (setFound(null), setError(problem.message)),
      );
  };
  return html`
    <section>
      <h2>Who holds this prompt, and where would it go</h2>
      <form onSubmit=${submit}>
        <label>It is<select value=${form} onChange=${(e) => setForm(e.target.value)}>
          ${Object.entries(FORMS).map(([name, { label }]) => html`<option key=${name} value=${name}>${label}</option>`)}
        </select></label>
        <label>Model<input value=${model} onInput=${set("model")} /></label>
        <label>LoRA adapter<input value=${lora_name} onInput=${set("lora_name")} /></label>
        <label class="full">${FORMS[form].hint}<textarea required spellcheck=${false} value=${text} onInput=${set("text")}></textarea></label>
        <button class="main">Look up</button>
      </form>
      ${error && html`<p class="bad" role="alert">${error}</p>`}
    </section>
    ${
      found &&
      html`<section>
      <div class="title"><h2>Held along the prompt</h2><span class="note">${number(found.isl_tokens)} tokens, ${number(found.isl_blocks)} blocks</span></div>
      <${Holders} found=${found} />
    </section>`
    }
    ${found && html`<${Route} found=${found} />`}
  `;
}
