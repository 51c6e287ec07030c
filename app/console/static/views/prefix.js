import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { ask, objects } from "../api.js";
import { Legend, Stack } from "../bars.js";
import { Candidates, whyNot } from "../candidates.js";
import { number, percent, sentence } from "../format.js";
import { TIERS, workerLink } from "./workers.js";

const MAX_HOLDERS = 100;
const FORMS = {
  chat: { label: "Chat", hint: "A chat: the body of a request or its messages as JSON, or text, whose lines may begin with system:, user: or assistant:" },
  text: { label: "Text", hint: "Text of a prompt, as a completion would send it" },
  token_ids: { label: "Token ids", hint: "Token ids: a JSON list, or numbers apart by spaces" },
  hashes: { label: "Block hashes", hint: "Hashes of its blocks: 16 hex digits each, in the prompt's order" },
};

const words = (text) => text.split(/[\s,[\]"]+/).filter(Boolean);
const ROLE = /^(system|user|assistant):[ \t]*/m;

// The messages of a chat as people paste it.
function chat(text) {
  try {
    const read = JSON.parse(text);
    if (typeof read === "object") {
      const { messages, model, tools } = Array.isArray(read) ? { messages: read } : read;
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

const READ = {
  chat,
  text: (text) => ({ text }),
  token_ids: (text) => ({ token_ids: words(text).map(Number) }),
  hashes: (text) => ({ hashes: words(text) }),
};

function Holders({ found }) {
  const holders = objects(found.holders);
  const { full_blocks } = found;
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
      return html`<span key=${row.worker}>${workerLink(row.worker)}</span><${Stack} parts=${parts} most=${full_blocks} label=${said} />
        <span class="number">${number(row.total)} = ${percent(row.total / full_blocks, 0)}</span>`;
    })}
    ${holders.length > MAX_HOLDERS && html`<p class="note">and ${number(holders.length - MAX_HOLDERS)} more</p>`}
  </div>`;
}

const Route = ({ route }) => {
  const prices = { ...route, best: route.best_worker };
  return html`<section>
    <div class="title"><h2>Where it would go now: <span class="id">${route.worker}</span></h2><span class="note">a dry run: nothing is reserved</span></div>
    <p>${sentence(route.locality_text)} ${whyNot(prices)}</p>
    <${Candidates} ...${prices} />
  </section>`;
};

export function Prefix() {
  const [form, setForm] = useState("chat");
  const [{ text, model, lora_name }, setFields] = useState({ text: "", model: "", lora_name: "" });
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const set = (name) => (event) => setFields((fields) => ({ ...fields, [name]: event.target.value }));
  const submit = (event) => {
    event.preventDefault();
    setError("");
    const body = { ...READ[form](text), ...(model && { model }), ...(lora_name && { lora_name }) };
    ask("prefix", body).then(setFound, (problem) => (setFound(null), setError(problem.message)));
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
      <div class="title"><h2>Held along the prompt</h2><span class="note">${number(found.tokens)} tokens, ${number(found.full_blocks)} full blocks of ${found.block_size}</span></div>
      <${Holders} found=${found} />
    </section>`
    }
    ${found?.route && html`<${Route} route=${found.route} />`}
    ${found?.route_error && html`<section><p class="bad">It would go nowhere now: ${found.route_error}</p></section>`}
  `;
}
