// Bars and shades drawn as plain elements.
import { html } from "./vendor/htm-preact-standalone.module.js";

const share = (value, most) => `${most > 0 ? Math.max(0, Math.min(100, (100 * value) / most)) : 0}%`;

// A number with a small bar below it. most: what fills the bar.
export const Bar = ({ value, most, text, tone = "accent" }) => html`<span class="bar">
  <span>${text}</span>
  <i aria-hidden="true"><b class=${tone} style=${{ width: share(value ?? 0, most) }}></b></i>
</span>`;

// Numbers over time, each as high as its share of the largest.
export const Spark = ({ values, label }) => html`<span class="spark" role="img" aria-label=${label}>
  ${values.map((value) => html`<b style=${{ height: share(value, Math.max(...values)) }}></b>`)}
</span>`;

// Parts side by side: [{name, value, tone}], on a scale that `most` fills.
export const Stack = ({ parts, most, label }) => html`<span class="stack" role="img" aria-label=${label}>
  ${parts.map(
    ({ name, value, tone, text }) =>
      value > 0 && html`<b class=${tone} title=${`${name} ${text ?? ""}`} style=${{ width: share(value, most) }}></b>`,
  )}
</span>`;

export const Legend = ({ parts }) => html`<ul class="legend">
  ${parts.map(({ name, tone, text }) => html`<li><i class=${tone} aria-hidden="true"></i>${name}${text && html` <b>${text}</b>`}</li>`)}
</ul>`;
