// A table that sorts by its heads and draws only the rows in sight.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact-standalone.module.js";

const ROW_PX = 30;
const AROUND = 8;
const ALL_BELOW = 80;

const names = new Intl.Collator("en", { numeric: true });
const order = (a, b) => (typeof a === "string" ? names.compare(a, b) : (a ?? -Infinity) - (b ?? -Infinity) || 0);

function sorted(rows, column, down) {
  if (!column?.sort) return rows;
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => sign * order(column.sort(a), column.sort(b)));
}

function Head({ column, by, down, sortBy }) {
  const kind = column.number ? "number" : "";
  if (!column.sort) return html`<th scope="col" class=${kind}>${column.head}</th>`;
  const state = by === column.head ? (down ? "descending" : "ascending") : "none";
  return html`<th scope="col" class=${kind} aria-sort=${state}>
    <button type="button" title=${column.title} onClick=${() => sortBy(column)}>${column.head}</button>
  </th>`;
}

// columns: [{head, title, cell(row), sort(row), of(row), number, down}], left out where `sort` or `of`
// gives nothing for any row; id(row): its key; initial: sorted by that head. Numbers, and what is
// `down`, have the largest first.
const startsDown = (column) => Boolean(column?.number || column?.down);
const isKnown = (rows) => (column) => {
  const of = column.sort ?? column.of;
  return !of || rows.some((row) => (of(row) ?? null) !== null);
};

export function Table({ label, columns: all, rows, id, initial, empty = "none", height = 520, tone }) {
  const columns = all.filter(isKnown(rows));
  const [{ by, down }, setSort] = useState({
    by: initial,
    down: startsDown(columns.find((c) => c.head === initial)),
  });
  const [top, setTop] = useState(0);
  const box = useRef(null);
  const shown = useMemo(
    () =>
      sorted(
        rows,
        columns.find((c) => c.head === by),
        down,
      ),
    [rows, by, down],
  );
  const windowed = shown.length > ALL_BELOW;
  const first = windowed ? Math.max(0, Math.floor(top / ROW_PX) - AROUND) : 0;
  const last = windowed ? Math.min(shown.length, first + Math.ceil(height / ROW_PX) + 2 * AROUND) : shown.length;
  const sortBy = (column) =>
    setSort((now) => ({ by: column.head, down: now.by === column.head ? !now.down : startsDown(column) }));
  useEffect(() => {
    if (box.current) box.current.scrollTop = 0;
  }, [by, down]);

  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="table" ref=${box} tabindex="0" role="region" aria-label=${label}
    style=${windowed ? { maxHeight: `${height}px` } : {}} onScroll=${windowed && (() => setTop(box.current.scrollTop))}>
    <table aria-rowcount=${shown.length + 1}>
      <thead><tr>${columns.map((column) => html`<${Head} key=${column.head} ...${{ column, by, down, sortBy }} />`)}</tr></thead>
      <tbody>
        ${first > 0 && html`<tr aria-hidden="true" class="gap" style=${{ height: `${first * ROW_PX}px` }}></tr>`}
        ${shown.slice(first, last).map(
          (row, at) => html`<tr key=${id(row)} aria-rowindex=${first + at + 2} class=${tone?.(row) ?? ""}>
            ${columns.map((column) => html`<td class=${column.number ? "number" : ""}>${column.cell(row)}</td>`)}
          </tr>`,
        )}
        ${last < shown.length && html`<tr aria-hidden="true" class="gap" style=${{ height: `${(shown.length - last) * ROW_PX}px` }}></tr>`}
      </tbody>
    </table>
  </div>`;
}
