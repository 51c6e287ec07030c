// Curves over time, drawn by uPlot in the page's own colours.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { short } from "./format.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Events as thin lines behind the curves. marks: [{at_ms}].
function marking(marks) {
  return {
    hooks: {
      drawClear: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = colour("mark");
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        for (const { at_ms } of marks.current) {
          const x = plot.valToPos(at_ms / 1000, "x", true);
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };
}

function options(width, height, lines, text, plugin, span) {
  const axis = {
    stroke: colour("faint"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
    gap: 4,
  };
  return {
    width,
    height,
    padding: [8, 28, 0, 0],
    legend: { live: true },
    cursor: { y: false, points: { size: 5 }, sync: { key: "kvroute" } },
    scales: {
      x: { range: (_, low, high) => (span.current ? [Math.min(low, high - span.current), high] : [low, high]) },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : 1] },
    },
    axes: [
      {
        ...axis,
        values: (_, ats, __, ___, step) => ats.map((s) => at(s).slice(0, step < 60 ? 8 : 5)),
        space: 70,
        size: 26,
      },
      { ...axis, values: (_, values) => values.map(text), size: 58 },
    ],
    series: [
      { label: "at", value: (plot, value) => at(value ?? plot.data[0].at(-1)) },
      ...lines.map(({ label, tone, fill }) => ({
        label,
        stroke: colour(tone),
        width: 1.5,
        fill: fill && `${colour(tone)}22`,
        points: { show: false },
        value: (plot, value, line, index) => text(index === null ? lastOf(plot.data[line]) : value),
      })),
    ],
    plugins: [plugin],
  };
}

const lastOf = (values) => values.findLast((value) => value !== null && value !== undefined);
const at = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

// One set of axes. at: seconds, ascending. lines: [{label, values, tone, fill}], null for a gap.
// from: seconds that the time axis has, up to now; 0: as many as there are samples of.
export function Chart({ title, at, from = 0, lines, marks = [], text = short, height = 150, children }) {
  const box = useRef(null);
  const span = useRef(from);
  span.current = from;
  const plot = useRef(null);
  const seen = useRef(marks);
  const [theme, setTheme] = useState(0);
  seen.current = marks;
  const data = [at, ...lines.map(({ values }) => values)];
  const shape = lines.map(({ label, tone }) => `${label} ${tone}`).join();

  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    const width = () => Math.max(box.current.clientWidth, 120);
    plot.current = new uPlot(options(width(), height, lines, text, marking(seen), span), data, box.current);
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: width(), height }));
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, theme, height]);
  useEffect(() => plot.current?.setData(data), [at]);

  const last = lines.map(({ label, values }) => `${label} ${text(lastOf(values))}`);
  return html`<figure class="chart">
    <figcaption class="title"><span>${title}</span>${children}</figcaption>
    <div ref=${box} role="img" aria-label=${`${title}: now ${last.join(", ")}`}></div>
  </figure>`;
}
