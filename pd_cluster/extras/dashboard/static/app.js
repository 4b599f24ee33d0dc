// Starts the dashboard: a session, the pages, and, while the page is visible, two queries of the scheduler a second.

import { begin, get, login, view } from "./api.js";
import { ClusterPage } from "./cluster.js";
import { Details } from "./details.js";
import { clock, h } from "./dom.js";
import { PlaygroundPage } from "./playground.js";
import { RequestsPage } from "./requests.js";
import { rates } from "./picture.js";

const PERIOD_MS = 500, MAX_MARKS = 500;
const main = document.getElementById("main"), connection = document.getElementById("connection");

function theme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
}

class App {
  constructor() {
    this.details = new Details(document.getElementById("details"));
    this.pages = { cluster: new ClusterPage(this.details) };
    if (view.isWhole) Object.assign(this.pages, { requests: new RequestsPage(), playground: new PlaygroundPage() });
    for (const link of document.querySelectorAll("nav a")) link.hidden = !(link.hash.slice(1) in this.pages);
    this.samples = [];
    this.marks = [];
    this.before = null;
    addEventListener("hashchange", () => this.turn());
  }

  turn() {
    const name = location.hash.slice(1) in this.pages ? location.hash.slice(1) : "cluster";
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.page = this.pages[name];
    main.replaceChildren(...this.page.element);
    this.show();
  }

  async look() {
    const since = this.samples.at(-1)?.at_s, mark = this.marks.at(-1)?.number ?? 0;
    const overview = await get(`/overview?since_mark=${mark}${since ? `&since=${since}` : ""}`);
    if (this.started !== undefined && this.started !== overview.started_s) { // the scheduler has restarted, so its marks begin again
      this.samples = [];
      this.marks = [];
      this.before = null;
    }
    this.started = overview.started_s;
    this.samples = [...this.samples, ...overview.samples].slice(-overview.max_samples);
    this.marks = [...this.marks, ...overview.marks].slice(-MAX_MARKS);
    overview.samples = this.samples;
    this.measure(overview);
    this.overview = overview;
    document.getElementById("about").textContent = `${overview.model} · version ${overview.version}`;
    connection.textContent = `live, ${clock(overview.now_s)}`;
    connection.className = "";
    this.show();
  }

  // Computes rates from two answers that are at least a second apart, so that the rates do not flicker.
  measure(overview) {
    if (this.before === null || overview.now_s - this.before.now_s >= 1) {
      this.rate = rates(overview.instances, this.before?.instances, overview.now_s - (this.before?.now_s ?? 0));
      this.before = overview;
    }
    for (const each of overview.instances) {
      if (!this.rate.has(each.instance_id)) this.rate.set(each.instance_id, { sent: 0, received: 0, steps: 0 });
    }
  }

  show() {
    if (!this.overview) return;
    this.details.show(this.overview, this.rate);
    if (this.page === this.pages.cluster) this.page.show(this.overview, this.rate, this.marks);
    else this.page.show().catch((error) => { connection.textContent = error.message; });
  }

  async run() {
    this.turn();
    for (;;) {
      try {
        await this.look();
      } catch (error) {
        if (error.status === 401) return closed(error.message);
        if (error.status === 429) { // this session's other tabs have used up the query rate
          await pause(PERIOD_MS);
          continue;
        }
        connection.textContent = `no answer: ${error.message}; shown: ${this.overview ? clock(this.overview.now_s) : "nothing"}`;
        connection.className = "lost";
      }
      await pause(PERIOD_MS);
      await seen(); // a hidden tab sends no queries
    }
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Resolves once the page is visible.
function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
  });
}

function closed(reason) {
  const command = view.isWhole ? "pd-cluster dashboard" : "pd-cluster dashboard --public";
  main.replaceChildren(h("section", {},
    h("h2", {}, view.takesKeys ? "An API key or a link is needed" : "A link is needed"), h("p", {}, reason),
    view.takesKeys ? keyForm() : null,
    h("p", {}, "On the scheduler's host, this command prints a link that works once, within a minute:"), h("pre", {}, command)));
  for (const link of document.querySelectorAll("nav a")) link.hidden = true;
  connection.textContent = "no session";
  connection.className = "lost";
}

function keyForm() {
  const key = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const note = h("p", { role: "alert" });
  return h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await login({ api_key: key.value.trim() });
      location.reload();
    } catch (error) {
      note.textContent = error.message;
    }
  } }, h("label", { for: "key" }, "API key "), key, " ", h("button", { class: "main" }, "Show the figures"), note);
}

theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
let app = null;
document.getElementById("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", name);
  theme(name);
  app?.pages.cluster.recolour();
});

try {
  if (await begin()) {
    app = new App();
    await app.run();
  } else closed("This browser has no session of the dashboard.");
} catch (error) {
  closed(error.message);
}
