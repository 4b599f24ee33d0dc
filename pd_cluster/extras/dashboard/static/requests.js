// The page "Requests": the last requests, and the path of a selected one. The scheduler keeps no prompts or answers.

import { get } from "./api.js";
import { h, seconds, table, update } from "./dom.js";
import { drawTimeline } from "./timeline.js";

const LIMIT = 50;

export class RequestsPage {
  constructor() {
    this.list = h("section");
    this.one = h("section", { "aria-live": "polite" }, h("p", { class: "quiet" }, "Choose a request to see its path."));
    this.element = [this.one, this.list];
    this.chosen = null;
  }

  async show() {
    const { requests, num_kept: kept } = await get(`/requests?limit=${LIMIT}`);
    const rows = requests.map((each) => [
      h("button", { type: "button", onclick: () => this.choose(each.request_id) }, each.request_id),
      each.status, seconds(each.age_s), each.duration_ms === null ? "–" : seconds(each.duration_ms / 1000),
      String(each.num_prompt_tokens), each.prefill, each.decode, each.num_replays ? String(each.num_replays) : "",
    ]);
    update(this.list, table(["request", "status", "age", "took", "prompt", "prefill", "decode", "continued"], rows, `The last ${requests.length} of ${kept} requests`));
  }

  async choose(id) {
    try {
      const timeline = await get(`/requests/${encodeURIComponent(id)}/timeline`);
      this.one.replaceChildren(h("h2", {}, `${id}: ${timeline.status}`), drawTimeline(timeline));
    } catch (error) {
      this.one.replaceChildren(h("p", {}, error.message));
    }
  }
}
