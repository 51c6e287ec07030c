// The frame: head, navigation by the part behind #, and one view below it.
import { html, render, useEffect, useState } from "./vendor/htm-preact-standalone.module.js";
import { freshness, setKey, useHealth, usePoll } from "./api.js";
import { age as aged, number } from "./format.js";
import { Decisions } from "./views/decisions.js";
import { Events } from "./views/events.js";
import { Explanation } from "./views/explanation.js";
import { Overview } from "./views/overview.js";
import { Prefix } from "./views/prefix.js";
import { Reuse } from "./views/reuse.js";
import { Usage } from "./views/usage.js";
import { Waiting } from "./views/waiting.js";
import { Worker } from "./views/worker.js";
import { Workers } from "./views/workers.js";

// So that the head knows, also where the view below it asks for nothing.
const HEALTH_MS = 2_000;
const PAGES = [
  ["overview", "Overview", Overview],
  ["reuse", "Reuse", Reuse],
  ["workers", "Workers", Workers, Worker],
  ["decisions", "Decisions", Decisions, Explanation],
  ["prefix", "Prefix", Prefix],
  ["waiting", "Waiting", Waiting],
  ["usage", "Usage", Usage],
  ["events", "Events", Events],
];

function useHash() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const [name, rest] = hash.replace(/^#\/?/, "").split(/\/(.*)/s);
  return [PAGES.find(([id]) => id === name) ?? PAGES[0], rest && unescaped(rest)];
}

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function Health() {
  const health = useHealth(500);
  usePoll("waiting", HEALTH_MS);
  const { age, kind, why } = freshness(health);
  useEffect(() => {
    document.body.className = kind;
  }, [kind]);
  let text = health.at ? `${number(age / 1000, 1)} s old` : "loading";
  if (why) text = health.at ? `${why}; data ${aged(age)} old` : why;
  if (health.paused) text = "paused";
  return html`<p class=${`health ${kind}`} data-age-ms=${age}><i aria-hidden="true"></i><span>${text}</span></p>`;
}

// Above what is old, so that nobody takes it for what is.
function Old() {
  const health = useHealth(1000);
  const { age, kind, why } = freshness(health);
  if (!kind || health.refused) return null;
  const what = health.error || !why ? "The router does not answer" : "Redis does not answer its routers";
  const todo = health.error || !why
    ? "Is it up, and reachable from here? Others of its replicas show the same page."
    : "Is Redis up, and reachable from its routers? Until then requests are routed by load alone, not to the caches that they need.";
  return html`<section class="old" role="alert">
    <p><b>${what}.</b> ${health.at ? `What is below is ${aged(age)} old.` : ""} <span class="faint">${why}</span></p>
    <p class="note">→ ${todo}</p>
  </section>`;
}

function KeyForm() {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setKey(text.trim());
    dispatchEvent(new Event("kvroute-key"));
  };
  return html`<section>
    <h2>This router asks for an operator's key</h2>
    <p class="note">One that its --api-key-file names so: NAME KEY operator. Keys of other clients do not open the console. It is kept by this tab alone, and forgotten when the tab closes.</p>
    <form onSubmit=${submit}>
      <label class="grow">Operator's key<input type="password" autocomplete="off" required value=${text} onInput=${(e) => setText(e.target.value)} /></label>
      <button class="main">Open</button>
    </form>
  </section>`;
}

const Refusal = () => useHealth(60_000).refused && html`<${KeyForm} />`;

function Page() {
  const [[current, title, View, Detail], rest] = useHash();
  useEffect(() => {
    document.title = `${rest || title} · kvroute`;
    scrollTo(0, 0);
    document.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [title, rest]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.querySelector("main").focus())}>Skip to content</a>
    <header>
      <h1><img src="static/icon.svg" alt="" />kvroute</h1>
      <nav aria-label="Pages">
        ${PAGES.map(([id, name]) => html`<a key=${id} href=${`#/${id}`} aria-current=${id === current ? "page" : undefined}>${name}</a>`)}
      </nav>
      <${Health} />
    </header>
    <main id="main" tabindex="-1">
      <${Refusal} />
      <${Old} />
      ${rest && Detail ? html`<${Detail} key=${rest} id=${rest} />` : html`<${View} key=${current} />`}
    </main>
  `;
}

render(html`<${Page} />`, document.body);
