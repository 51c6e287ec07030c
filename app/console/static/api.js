// Asks the replica: each answer says when it was made, and nothing is asked while nobody looks.
import { useEffect, useState } from "./vendor/htm-preact-standalone.module.js";

const KEY = "kvroute-key";
const POLL_TIMEOUT_MS = 10_000;
// A prompt may wait for an engine that makes its ids.
const ASK_TIMEOUT_MS = 30_000;
const SLOWEST_MS = 15_000;

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

// What the head of the page shows: of the last answer to any poll.
export const health = { at: 0, error: "", stale: "", refused: false, paused: false, listeners: new Set() };

function note(change) {
  Object.assign(health, change);
  for (const listener of health.listeners) listener();
}

const LATE_MS = 5_000;

// {age, kind, why}: of what the page shows, in ms; kind: "" for new, else late or away.
export function freshness({ at, error, stale, paused }) {
  const age = at ? Date.now() - at : 0;
  const why = error || stale;
  if (paused) return { age, kind: "", why: "" };
  return { age, kind: why ? "away" : age > LATE_MS ? "late" : "", why };
}

export function useHealth(everyMs) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((n) => n + 1);
    health.listeners.add(listener);
    const timer = setInterval(() => document.hidden || listener(), everyMs);
    return () => {
      health.listeners.delete(listener);
      clearInterval(timer);
    };
  }, []);
  return health;
}

export class Problem extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function send(path, options, timeoutMs, signal) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const timeout = new AbortController();
  const abort = () => timeout.abort();
  const timer = setTimeout(abort, timeoutMs);
  signal?.addEventListener("abort", abort);
  try {
    // The page keeps the answer itself, so that a browser's cache never serves an old one.
    const response = await fetch(path, { ...options, headers, signal: timeout.signal, cache: "no-store" });
    if (response.ok || response.status === 304) return response;
    throw new Problem(response.status, await reason(response));
  } catch (error) {
    if (error instanceof Problem) throw error;
    throw new Problem(0, "no answer from the router");
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

async function reason(response) {
  try {
    const body = await response.json();
    return String(body.error?.message ?? response.statusText);
  } catch {
    return `status ${response.status}`;
  }
}

async function asked(path, body) {
  const headers = { "content-type": "application/json", "x-kvroute-console": "1" };
  const options = body === null ? {} : { method: "POST", headers, body: JSON.stringify(body) };
  return (await send(path, options, ASK_TIMEOUT_MS)).json();
}

// One question to the console, and to the router as its clients ask it. body: null for a GET.
export const ask = (path, body = null) => asked(`api/${path}`, body);
export const askRouter = (path, body) => asked(`../${path}`, body);

// {data, error} of `path`, asked for again and again; data stays while errors come.
// merge(answer, data): what to keep, of which `next`, if any, is the path to ask for then.
export function usePoll(path, everyMs = 1500, merge = (next) => next) {
  const [state, setState] = useState({ path });
  useEffect(() => poll(path, everyMs, merge, (change) => setState({ path, ...change })), [path, everyMs]);
  return state.path === path ? state : { path };
}

// When the answer's data was current: now, unless the router had to repeat an old one.
function made(response) {
  const stale = response.headers.get("x-kvroute-stale") ?? "";
  if (!stale) return { at: Date.now(), stale };
  return { at: health.at || Number(response.headers.get("x-kvroute-at-ms")), stale };
}

function poll(path, everyMs, merge, tell) {
  const stop = new AbortController();
  let timer = 0;
  let etag = "";
  let failures = 0;
  let asking = false;
  let data;

  async function look() {
    clearTimeout(timer);
    if (asking || stop.signal.aborted) return;
    if (document.hidden) return note({ paused: true });
    asking = true;
    try {
      const headers = etag ? { "if-none-match": etag } : {};
      const response = await send(`api/${data?.next ?? path}`, { headers }, POLL_TIMEOUT_MS, stop.signal);
      etag = response.headers.get("etag") ?? "";
      if (response.status !== 304) data = merge(await response.json(), data);
      tell({ data, error: "" });
      failures = 0;
      note({ ...made(response), error: "", refused: false, paused: false });
    } catch (error) {
      if (stop.signal.aborted) return;
      failures += 1;
      tell({ data, error: error.message });
      // What is not there (any longer) was said by a router that answers.
      if (error.status === 404) note({ at: Date.now(), error: "", stale: "", refused: false, paused: false });
      else note({ error: error.message, refused: error.status === 401, paused: false });
    } finally {
      asking = false;
    }
    if (!stop.signal.aborted) timer = setTimeout(look, Math.min(everyMs * 2 ** Math.min(failures, 6), SLOWEST_MS));
  }

  document.addEventListener("visibilitychange", look);
  addEventListener("kvroute-key", look);
  look();
  return () => {
    stop.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
    removeEventListener("kvroute-key", look);
  };
}

// The rows of a {columns, rows} table as objects.
export const objects = (table) =>
  (table?.rows ?? []).map((row) => Object.fromEntries(table.columns.map((name, at) => [name, row[at]])));
