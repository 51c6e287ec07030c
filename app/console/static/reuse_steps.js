// Where reuse is lost: each step's bar is what the step before it kept, in what is kept and lost.
import { html } from "./vendor/htm-preact-standalone.module.js";
import { Stack } from "./bars.js";
import { percent, short } from "./format.js";

const STEPS = [
  ["seen", "asked before", "within the last hour, of the same router"],
  ["held", "held by a worker", "the most that any holds"],
  ["best", "by one with room", "the most that any holds that could take the request"],
  ["chosen", "by the chosen one", "of that, what the one holds that got the request"],
  ["used", "read from cache", "as the engine reported"],
];
const TONES = ["c2", "c4", "c5", "c7", "c6", "c3"];

export const STEP_NAMES = Object.fromEntries(STEPS);

// Causes keep their colours whatever is lost now: in the order of their names.
export function toned(losses) {
  const causes = [...new Set(losses.map(({ cause }) => cause))].sort();
  return Object.fromEntries(causes.map((cause, at) => [cause, cause === "new" ? "rest" : TONES[at % TONES.length]]));
}

export function ReuseSteps({ counts }) {
  const all = counts.prompt_tokens;
  const losses = counts.losses ?? [];
  const tones = toned(losses);
  if (!all) return html`<p class="empty">No prompt has been routed yet.</p>`;
  return html`<div class="reuse-steps">
    ${STEPS.map(([step, name, hint]) => {
      const lost = losses.filter(({ to, tokens }) => to === step && tokens > 0);
      const parts = [
        { name, value: counts[step], tone: "c1", text: percent(counts[step] / all) },
        ...lost.map(({ cause, tokens }) => ({
          name: `lost: ${cause}`,
          value: tokens,
          tone: tones[cause],
          text: percent(tokens / all),
        })),
      ];
      const said = parts.map((part) => `${part.name} ${part.text}`).join(", ");
      return html`<div class="step" key=${step}>
        <span title=${hint}>${name}</span>
        <${Stack} parts=${parts} most=${all} label=${said} />
        <b>${percent(counts[step] / all)}</b>
        <span class="lost">${lost.map(({ cause, tokens }) => html`<span key=${cause}><i class=${tones[cause]} aria-hidden="true"></i>${cause} ${percent(tokens / all)}</span>`)}</span>
      </div>`;
    })}
    <p class="note">of ${short(all)} prompt tokens = 100 %</p>
  </div>`;
}
