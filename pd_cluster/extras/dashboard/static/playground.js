// The page "Playground": a chat, or two with different settings side by side, and the path of each answer.
// Texts and the API key are kept only in this page; the key is sent to the public port with each question.

import { get, send } from "./api.js";
import { h, seconds } from "./dom.js";
import { drawTimeline } from "./timeline.js";

const TIMELINE_TRIES = 10, TIMELINE_PAUSE_MS = 200;
const LEAST_RATED_TOKENS = 8, LEAST_RATED_S = 0.05; // with fewer tokens, or in less time, a rate means nothing

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (buffer + value).split("\n");
      buffer = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

const bucket = (logprob) => {
  const probability = Math.exp(logprob);
  return probability > 0.9 ? "p4" : probability > 0.5 ? "p3" : probability > 0.1 ? "p2" : "p1";
};

function tokenSpan(entry) {
  const others = entry.top_logprobs.map((each) => `${JSON.stringify(each.token)} ${(100 * Math.exp(each.logprob)).toFixed(1)} %`);
  return h("span", { class: `token ${bucket(entry.logprob)}`, title: others.join("\n") }, entry.token);
}

class Pane {
  constructor(title, key) {
    this.key = key;
    const field = (label, input, wide = false) => h("label", { class: wide ? "wide" : "" }, label, input);
    const number = (value, step, min, max) => h("input", { type: "number", value, step, min, max });
    this.model = h("select");
    this.temperature = number("0", "0.1", "0", "2");
    this.topP = number("1", "0.05", "0", "1");
    this.maxTokens = number("256", "1", "1");
    this.seed = h("input", { type: "number", placeholder: "random" });
    this.system = h("textarea", { rows: "2", placeholder: "none" });
    this.tools = h("textarea", { rows: "2", placeholder: '[{"type": "function", "function": {…}}]' });
    this.logprobs = h("input", { type: "checkbox" });
    this.talk = h("div", { class: "talk", role: "log", "aria-label": `Conversation, ${title}`, tabindex: "0" });
    this.path = h("div", { "aria-live": "polite" });
    this.messages = [];
    this.element = h("section", {},
      h("h2", {}, title),
      h("details", { open: true }, h("summary", {}, "Settings"), h("div", { class: "controls" },
        field("model", this.model), field("temperature", this.temperature), field("top_p", this.topP),
        field("max_tokens", this.maxTokens), field("seed", this.seed), field("colour by probability", this.logprobs),
        field("system message", this.system, true), field("tools, as JSON", this.tools, true))),
      this.talk, this.path);
  }

  // Lists the models, each with its adapters in a group below it.
  offer(models, chosen) {
    const before = this.model.value;
    const option = (each) => h("option", { value: each.id }, each.id);
    const parents = [...new Set(models.map((each) => each.parent).filter(Boolean))];
    this.model.replaceChildren(...models.filter((each) => !each.parent).map(option),
      ...parents.map((name) => h("optgroup", { label: `adapters of ${name}` }, models.filter((each) => each.parent === name).map(option))));
    const wanted = models.some((each) => each.id === before) ? before : chosen;
    if (wanted) this.model.value = wanted;
  }

  body() {
    const tools = this.tools.value.trim();
    const system = this.system.value.trim();
    return {
      model: this.model.value || undefined,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: Number(this.temperature.value), top_p: Number(this.topP.value), max_tokens: Number(this.maxTokens.value),
      ...(this.seed.value ? { seed: Number(this.seed.value) } : {}),
      ...(tools ? { tools: JSON.parse(tools) } : {}),
      ...(this.logprobs.checked ? { logprobs: true, top_logprobs: 5 } : {}),
      stream: true, stream_options: { include_usage: true },
    };
  }

  clear() {
    this.messages = [];
    this.talk.replaceChildren();
    this.path.replaceChildren();
  }

  async ask(content, shown, signal) {
    this.messages.push({ role: "user", content });
    this.talk.append(h("div", { class: "said user" }, ...shown));
    const said = h("div", { class: "said" });
    this.talk.append(said);
    const asked = performance.now();
    let first = null, usage = null, id = null, text = "", thought = null;
    const calls = [];
    try {
      const answer = await send("/chat", { method: "POST", body: this.body(), headers: this.key(), signal });
      const servedBy = answer.headers.get("x-pd-served-by");
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        id = event.id ?? id;
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content;
        if (reasoning) {
          if (!thought) said.prepend((thought = h("div", { class: "thought" })));
          thought.append(reasoning);
        }
        const piece = choice.delta.content;
        if (piece || reasoning) first ??= performance.now();
        if (piece) {
          text += piece;
          const entries = choice.logprobs?.content;
          said.append(...(entries?.length ? entries.map(tokenSpan) : [piece]));
        }
        for (const call of choice.delta.tool_calls ?? []) {
          calls[call.index] ??= { name: "", arguments: "" };
          calls[call.index].name += call.function?.name ?? "";
          calls[call.index].arguments += call.function?.arguments ?? "";
        }
        this.talk.scrollTop = this.talk.scrollHeight;
      }
      for (const call of calls.filter(Boolean)) said.append(h("div", {}, `${call.name}(${call.arguments})`));
      this.messages.push({ role: "assistant", content: text });
      const took = (performance.now() - asked) / 1000, ttft = first === null ? null : (first - asked) / 1000;
      const tokens = usage?.completion_tokens ?? 0;
      const rate = ttft !== null && tokens >= LEAST_RATED_TOKENS && took - ttft >= LEAST_RATED_S ? `, ${((tokens - 1) / (took - ttft)).toFixed(1)} tokens/s` : "";
      said.append(h("div", { class: "quiet" }, `${tokens} tokens, first after ${seconds(ttft)}, ${seconds(took)} in all${rate}${servedBy ? `; ${servedBy.replace(",", " → ")}` : ""}`));
      if (id) await this.showPath(id);
    } catch (error) {
      this.messages.pop();
      said.classList.add("error");
      said.append(error.name === "AbortError" ? " (stopped)" : error.message);
    }
  }

  async showPath(id) {
    for (let tries = 0; tries < TIMELINE_TRIES; tries += 1) {
      try {
        const timeline = await get(`/requests/${encodeURIComponent(id)}/timeline`);
        this.path.replaceChildren(h("h3", {}, "The path of this request"), drawTimeline(timeline));
        if (timeline.status !== "running" && timeline.events.some((event) => event.who === timeline.decode && event.what === "finished")) return;
      } catch (error) {
        this.path.replaceChildren(h("p", { class: "quiet" }, error.message));
      }
      await new Promise((resolve) => setTimeout(resolve, TIMELINE_PAUSE_MS)); // workers report events with their heartbeats
    }
  }
}

export class PlaygroundPage {
  constructor() {
    this.apiKey = h("input", { type: "password", autocomplete: "off", placeholder: "none", onchange: () => this.loadModels() });
    const key = () => (this.apiKey.value ? { "X-PD-API-Key": this.apiKey.value } : {});
    this.key = key;
    this.panes = [new Pane("Chat", key), new Pane("Second chat", key)];
    this.text = h("textarea", { "aria-label": "Message", placeholder: "Ask something. Enter sends, Shift+Enter begins a new line.", onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask();
      }
    } });
    this.images = h("input", { type: "file", accept: "image/*,video/*", multiple: true, "aria-label": "Images and videos, for models that see" });
    this.compare = h("input", { type: "checkbox", id: "compare", onchange: () => this.arrange() });
    this.sendButton = h("button", { type: "button", class: "main", onclick: () => (this.running ? this.running.abort() : this.ask()) }, "Send");
    this.note = h("p", { class: "quiet", role: "status" });
    this.holder = h("div", { class: "panes" });
    this.element = [h("section", {},
      h("h2", {}, "Playground"),
      h("div", { class: "ask" }, this.text, this.sendButton),
      h("div", { class: "buttons" },
        h("label", {}, "images ", this.images), h("span", {}, this.compare, " ", h("label", { for: "compare" }, "compare two settings")),
        h("button", { type: "button", onclick: () => this.panes.forEach((pane) => pane.clear()) }, "New conversation"),
        h("label", {}, "API key ", this.apiKey)),
      this.note), this.holder];
    this.running = null;
    this.loaded = false;
    this.arrange();
  }

  arrange() {
    this.holder.className = `panes ${this.compare.checked ? "two" : ""}`;
    this.holder.replaceChildren(...this.panes.slice(0, this.compare.checked ? 2 : 1).map((pane) => pane.element));
  }

  async show() {
    if (!this.loaded) await this.loadModels();
  }

  async loadModels() {
    this.loaded = true;
    try {
      const { data } = await (await send("/models", { headers: this.key() })).json();
      const adapters = data.filter((each) => each.parent);
      this.panes.forEach((pane, at) => pane.offer(data, adapters[at - 1]?.id)); // the second pane selects the first adapter
      this.note.textContent = adapters.length ? "Adapters are in the list of models; compare two settings to see one beside its model." : "";
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  async ask() {
    const text = this.text.value.trim();
    if (this.running || !text) return;
    const files = [...this.images.files];
    let content = text;
    const shown = [text];
    if (files.length) {
      const urls = await Promise.all(files.map(dataUrl));
      const kinds = files.map((file) => (file.type.startsWith("video/") ? "video_url" : "image_url"));
      content = [...urls.map((url, at) => ({ type: kinds[at], [kinds[at]]: { url } })), { type: "text", text }];
      shown.unshift(...urls.map((url, at) => (kinds[at] === "image_url" ? h("img", { src: url, alt: files[at].name }) : `[${files[at].name}] `)));
    }
    this.text.value = "";
    this.images.value = "";
    this.running = new AbortController();
    this.sendButton.textContent = "Stop";
    const panes = this.panes.slice(0, this.compare.checked ? 2 : 1);
    try {
      await Promise.all(panes.map((pane) => pane.ask(content, shown.map((each) => (each instanceof Node ? each.cloneNode(true) : each)), this.running.signal)));
    } finally {
      this.running = null;
      this.sendButton.textContent = "Send";
      this.text.focus();
    }
  }
}
