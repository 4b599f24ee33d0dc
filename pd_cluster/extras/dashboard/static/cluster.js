// The page "Cluster": problems, the picture, figures, charts, events.

import { Chart } from "./charts.js";
import { clock, count, h, seconds, table, update, withCode } from "./dom.js";
import { isDown, picture } from "./picture.js";

// Returns [name, number of used blocks in all instances] of each tier below the first, which is the pool itself.
function tiersBeyondThePool(instances) {
  const found = new Map();
  for (const tier of instances.flatMap((each) => each.tiers.slice(1))) {
    found.set(tier.name, (found.get(tier.name) ?? 0) + tier.num_used_blocks);
  }
  return [...found];
}

export class ClusterPage {
  constructor(details) {
    this.details = details;
    this.marks = [];
    this.problems = h("section", { class: "problems", "aria-live": "polite" });
    this.picture = h("section", { class: "two-thirds" });
    this.numbers = h("section", { class: "third" });
    this.events = h("section", { class: "third" });
    this.list = h("section", { class: "two-thirds" });
    const charts = (title, unit, lines, goal = null) => new Chart(title, unit, lines, () => this.marks, goal);
    this.charts = [
      charts("Tokens a second", "", [["tokens_per_s", "generated", "--flow"], ["prompt_tokens_per_s", "prompt", "--good"]]),
      charts("Requests", "", [["num_running", "running", "--flow"], ["num_queued", "queued", "--warn"]]),
      charts("Ended requests a second", "", [["finished_per_s", "finished", "--good"], ["failed_per_s", "failed", "--bad"], ["refused_per_s", "refused", "--warn"], ["replayed_per_s", "continued elsewhere", "--flow"]]),
      charts("Time to the first token", "ms", [["ttft_p50_s", "p50", "--flow", 1000], ["ttft_p99_s", "p99", "--warn", 1000]]),
      charts("Time per output token", "ms", [["tpot_p50_s", "p50", "--flow", 1000], ["tpot_p99_s", "p99", "--warn", 1000]]),
      charts("Time between tokens", "ms", [["itl_p50_s", "p50", "--flow", 1000], ["itl_p99_s", "p99", "--warn", 1000]]),
    ];
    this.element = [this.problems, this.picture, this.numbers, ...this.charts.map((chart) => chart.element), this.list, this.events];
    this.told = "";
  }

  recolour() {
    for (const chart of this.charts) if (chart.plot) chart.make();
  }

  show(overview, rate, marks) {
    this.marks = marks;
    this.showProblems(overview.problems);
    update(this.picture, h("h2", {}, "The cluster now"), picture(overview, rate, (name) => this.details.open(name), this.picture.clientWidth));
    this.showNumbers(overview);
    this.showList(overview);
    this.charts[3].goal = overview.slo_ttft_s && overview.slo_ttft_s * 1000;
    this.charts[4].goal = overview.slo_tpot_s && overview.slo_tpot_s * 1000;
    const newestS = overview.samples.at(-1)?.at_s;
    if (newestS === undefined || newestS !== this.drawnS) { // once a second, not after each query
      this.drawnS = newestS;
      for (const chart of this.charts) chart.show(overview.samples);
    }
    const latest = [...marks].reverse().slice(0, 60);
    const roles = overview.roles ? h("p", {}, `Roles: ${overview.roles.verdict}. ${overview.roles.why}`) : null;
    update(this.events, h("h2", {}, "Events"), roles, h("ul", { class: "marks", tabindex: "0", "aria-label": "Events, newest first" },
      latest.map((mark) => h("li", { class: mark.kind }, `${clock(mark.at_s)} ${mark.instance_id} ${mark.text}`))));
  }

  showProblems(problems) {
    const told = JSON.stringify(problems);
    if (told === this.told) return; // a screen reader would read it aloud again
    this.told = told;
    this.problems.className = `problems ${problems[0]?.severity ?? ""}`;
    this.problems.replaceChildren(problems.length
      ? h("ul", {}, problems.map((each) => h("li", { class: each.severity }, h("strong", {}, each.text), each.way_out ? h("span", {}, withCode(each.way_out)) : null)))
      : h("p", { class: "fine" }, "Nothing is wrong: every instance serves, and no request failed in the last minute."));
  }

  showNumbers(overview) {
    const last = overview.samples.at(-1) ?? {};
    const missed = (value, goal) => (goal && value > goal ? "missed" : "");
    const blocks = (kind) => overview.instances.reduce((total, each) => total + each[`num_${kind}_blocks`], 0);
    const all = blocks("free") + blocks("cached") + blocks("held");
    const figures = [
      ["tokens/s", count(last.tokens_per_s)],
      ["requests", `${overview.num_running}`],
      ["queued", `${overview.num_queued}`],
      ["TTFT p99", seconds(last.ttft_p99_s), missed(last.ttft_p99_s, overview.slo_ttft_s)],
      ["TPOT p99", seconds(last.tpot_p99_s), missed(last.tpot_p99_s, overview.slo_tpot_s)],
      ["inter-token p99", seconds(last.itl_p99_s)],
      ["KV held", all ? `${((100 * blocks("held")) / all).toFixed(0)} %` : "–"],
      ["KV cached", all ? `${((100 * blocks("cached")) / all).toFixed(0)} %` : "–"],
      ["tokens so far", count(overview.totals.generation_tokens)],
      ...tiersBeyondThePool(overview.instances).map(([name, used]) => [`${name}, blocks`, count(used)]),
    ];
    update(this.numbers, h("h2", {}, "Now (percentiles: last 10 s)"),
      h("dl", { class: "numbers" }, figures.map(([name, value, kind]) => h("div", { class: kind }, h("dt", {}, name), h("dd", {}, value)))));
  }

  showList(overview) {
    const rows = overview.instances.map((each) => [
      h("button", { type: "button", onclick: () => this.details.open(each.instance_id) }, each.instance_id),
      each.unit ? `${each.role}, rank ${each.unit_rank} of ${each.unit}` : each.role,
      h("span", { class: isDown(each) ? "down" : "" }, each.reason ? `${each.state}: ${each.reason}` : each.state),
      each.num_running, each.num_waiting,
      `${each.num_free_blocks}/${each.num_cached_blocks}/${each.num_held_blocks}`,
      each.num_preemptions,
    ].map((cell) => (cell instanceof Node ? cell : String(cell))));
    update(this.list, table(["instance", "role", "state", "run", "wait", "blocks free/cached/held", "preempted"], rows, "Instances"));
  }
}
