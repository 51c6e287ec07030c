// A heat map: a row a worker, a column a moment, the darker the longer its queue.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { clock, seconds } from "./format.js";

const MAX_ROWS = 400;
const MAX_NAMED = 25;

const dark = matchMedia("(prefers-color-scheme: dark)");
const ENDS = {
  light: [
    [236, 238, 240],
    [104, 162, 236],
    [8, 52, 128],
  ],
  dark: [
    [32, 37, 43],
    [45, 110, 200],
    [214, 234, 255],
  ],
};

function shade(part) {
  const [low, middle, high] = dark.matches ? ENDS.dark : ENDS.light;
  const [from, to, at] = part < 0.5 ? [low, middle, part * 2] : [middle, high, part * 2 - 1];
  return from.map((value, i) => value + (to[i] - value) * at);
}

function draw(canvas, rows, columns, most) {
  canvas.width = columns;
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows.length);
  rows.forEach(([, values], y) =>
    values.forEach((value, x) => {
      if (value === null) return;
      const [r, g, b] = shade(Math.sqrt(Math.min(1, value / most)));
      image.data.set([r, g, b, 255], (y * columns + x) * 4);
    }),
  );
  context.putImageData(image, 0, 0);
}

// at_s: seconds; workers: {name: queue seconds at each}, null where unknown.
export function Heat({ at_s, workers }) {
  const canvas = useRef(null);
  const [under, setUnder] = useState("");
  const rows = Object.entries(workers ?? {}).slice(0, MAX_ROWS);
  const most = Math.max(
    0.001,
    ...rows.map(([, values]) => values.reduce((high, value) => Math.max(high, value ?? 0), 0)),
  );
  useEffect(() => {
    if (canvas.current) draw(canvas.current, rows, at_s.length, most);
  }, [at_s, workers]);
  if (!rows.length || !at_s?.length) return html`<p class="empty">No history yet.</p>`;
  const pointed = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const x = Math.min(at_s.length - 1, Math.floor(((event.clientX - box.left) / box.width) * at_s.length));
    const y = Math.min(rows.length - 1, Math.floor(((event.clientY - box.top) / box.height) * rows.length));
    if (rows[y]) setUnder(`${rows[y][0]} at ${clock(at_s[x] * 1000)}: ${seconds(rows[y][1][x])}`);
  };
  const height = Math.max(72, Math.min(360, rows.length * 14));
  // With more, names would lie on each other; the line below has that of the row pointed at.
  const named = rows.length <= MAX_NAMED;
  return html`<div class="heatmap">
    <ol aria-hidden="true">${named && rows.map(([name]) => html`<li key=${name} class="clip">${name}</li>`)}</ol>
    <canvas class="heat" ref=${canvas} style=${{ height: `${height}px` }} role="img" onMouseMove=${pointed} onMouseLeave=${() => setUnder("")}
      aria-label=${`Queue of ${rows.length} workers over time, at most ${seconds(most)}`}></canvas>
    <p class="note ends"><span>${clock(at_s[0] * 1000)}</span><span>${under || `at most ${seconds(most)}`}</span><span>${clock(at_s.at(-1) * 1000)}</span></p>
  </div>`;
}
