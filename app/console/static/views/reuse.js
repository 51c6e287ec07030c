import { html, useState } from "../vendor/htm-preact-standalone.module.js";
import { usePoll } from "../api.js";
import { percent, short } from "../format.js";
import { ReuseSteps, STEP_NAMES } from "../reuse_steps.js";
import { Table } from "../table.js";

const COLUMNS = (all) => [
  { head: "step", cell: (loss) => STEP_NAMES[loss.to] ?? loss.to },
  { head: "lost because", cell: (loss) => loss.cause },
  { head: "tokens", number: true, sort: (loss) => loss.tokens, cell: (loss) => short(loss.tokens) },
  { head: "of all", number: true, sort: (loss) => loss.tokens, cell: (loss) => percent(loss.tokens / all, 2) },
];

export function Reuse() {
  const { data, error } = usePoll("funnel", 2000);
  const [model, setModel] = useState("");
  if (!data) return html`<p class="empty">${error || "Loading…"}</p>`;
  const counts = data.models[model] ?? data.models[""] ?? {};
  const names = Object.keys(data.models).filter(Boolean).sort();
  return html`
    <section>
      <div class="title">
        <h2>Where reuse is lost</h2>
        <label class="note">model <select value=${model} onChange=${(e) => setModel(e.target.value)}>
          <option value="">all</option>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
      </div>
      <${ReuseSteps} counts=${counts} />
      <p class="note">“Asked before” is an estimate, wrong by at most ${percent(data.seen_error)}; the other steps are counted.</p>
    </section>
    <section>
      <h2>Losses</h2>
      <${Table} label="Losses" columns=${COLUMNS(counts.prompt_tokens)} rows=${(counts.losses ?? []).filter((loss) => loss.tokens)} initial="tokens"
        id=${(loss) => `${loss.to} ${loss.cause}`} empty="Nothing is lost." />
    </section>
  `;
}
