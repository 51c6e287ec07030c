// Numbers and times as people read them; "–" for what is not known.
const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 0) {
  if (!known(value)) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }).replace("-", "−");
}

// 3 significant digits with k, M, G.
export function short(value) {
  if (!known(value)) return NONE;
  for (const [unit, name] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ])
    if (Math.abs(value) >= unit) return `${digits(value / (name === "k" ? 1e3 : unit))} ${name}`;
  return Number.isInteger(value) ? number(value) : digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  return number(value, size >= 100 ? 0 : size >= 10 ? 1 : size === 0 ? 0 : 2);
}

export const share = (value) => percent(value, 0);
export const percent = (value, places = 1) => (known(value) ? `${number(value * 100, places)} %` : NONE);

export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 120) return `${digits(value)} s`;
  if (size < 7200) return `${number(value / 60)} min`;
  if (size < 172_800) return `${number(value / 3600, 1)} h`;
  return `${number(value / 86_400, 1)} d`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [unit, name] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ])
    if (value >= unit) return `${digits(value / unit)} ${name}`;
  return `${value} B`;
}

// Whole seconds: what is older than that changes too fast to be read.
export const age = (ms) => (ms < 120_000 ? `${number(Math.max(0, ms) / 1000)} s` : seconds(ms / 1000));
// How long ago a time by the Redis clock is, by the one of this machine.
export const since = (ms) => (known(ms) ? `${age(Date.now() - ms)} ago` : NONE);

export const clock = (ms) => (known(ms) ? new Date(ms).toLocaleTimeString("en-GB") : NONE);
export const day = (ms) => (known(ms) ? new Date(ms).toLocaleString("sv-SE") : NONE);

const ended = (text) => (/[.?!]$/.test(text) ? text : `${text}.`);
export const sentence = (text) => (text ? ended(`${text[0].toUpperCase()}${text.slice(1)}`) : "");
