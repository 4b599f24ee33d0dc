// An instance's details, its log, and its commands, each with a description of its effect.

import { command, get, view } from "./api.js";
import { bytes, h, seconds, table, tierText, update } from "./dom.js";
import { isDown } from "./picture.js";

const LOG_LINES = 300;

const COMMANDS = {
  drain: ["Drain", (name) => `${name} gets no new requests, and finishes its running ones. "Put back" undoes it.`],
  undrain: ["Put back", (name) => `${name} takes requests again.`],
  role: ["Change role", (name, other) => `${name} is drained, then works as ${other}. Its process and its cache stay.`],
  remove: ["Remove", (name) => `${name} is drained and leaves the cluster. Its process runs until somebody ends it.`],
};

function stepText(each) {
  const drafts = each.num_draft_tokens ? `; ${((100 * each.num_accepted_tokens) / each.num_draft_tokens).toFixed(0)} % of ${each.num_draft_tokens} drafts right` : "";
  return `${seconds(each.decode_step_s)} for ${each.tokens_per_step.toFixed(1)} tokens of each sequence${drafts}`;
}

function unitText(each) {
  const rounds = each.num_rounds ? `; ${each.num_rounds} rounds, ${((100 * each.num_idle_rounds) / each.num_rounds).toFixed(0)} % idle, ${seconds(each.exchange_s)} of exchange` : "";
  return `rank ${each.unit_rank} of ${each.unit_size} in ${each.unit}${rounds}`;
}

export class Details {
  constructor(dialog) {
    this.dialog = dialog;
    this.name = null;
    dialog.addEventListener("close", () => { this.name = null; });
  }

  open(name) {
    this.name = name;
    this.figures = h("div");
    this.actions = h("div", { class: "buttons" });
    this.asked = h("div", { role: "status" });
    this.log = h("pre", { tabindex: "0", role: "region", "aria-label": `Log of ${name}` }, "…");
    this.dialog.replaceChildren(
      h("div", { class: "top" }, h("h2", { id: "details-title" }, name), h("button", { type: "button", onclick: () => this.dialog.close() }, "Close")),
      this.figures, ...(view.isWhole ? [this.actions, this.asked, h("h3", {}, "Log"), this.log] : []),
    );
    this.shown = "";
    if (!this.dialog.open) this.dialog.showModal();
    if (view.isWhole) this.readLog();
  }

  async readLog() {
    const name = this.name;
    try {
      const { lines } = await get(`/instances/${encodeURIComponent(name)}/logs?limit=${LOG_LINES}`);
      if (this.name === name) this.log.textContent = lines.join("\n") || "(no lines)";
    } catch (error) {
      if (this.name === name) this.log.textContent = error.message;
    }
    this.log.scrollTop = this.log.scrollHeight;
  }

  show(overview, rate) {
    if (this.name === null) return;
    const each = overview.instances.find((one) => one.instance_id === this.name);
    if (!each) {
      update(this.figures, h("p", {}, `${this.name} is not in the cluster any more.`));
      this.actions.replaceChildren();
      return;
    }
    const moves = rate.get(each.instance_id);
    const links = Object.entries(each.links).map(([peer, state]) => `${peer.split("@")[0]} ${state}`).join(", ");
    const asked = each.num_prefix_query_tokens;
    update(this.figures, table(["", ""], [
      ["state", `${each.state}${each.reason ? `: ${each.reason}` : ""}`],
      ["role", each.next_role ? `${each.role}, becomes ${each.next_role}` : each.role],
      ...(each.unit ? [["unit", unitText(each)]] : []),
      ...(view.isWhole ? [
        ["process", `${each.pid ?? "–"}, ranks ${each.rank_pids.join(", ") || "–"}`],
        ["address", `${each.host}:${each.port}, devices ${each.device_ids.join(", ")}`],
      ] : []),
      ["work", `${each.num_running} running, ${each.num_waiting} waiting, ${each.num_landing} landing, ${each.num_exporting} handed over`],
      ...(each.decode_step_s ? [["decode step", stepText(each)]] : []),
      ["KV blocks", `${each.num_free_blocks} free, ${each.num_cached_blocks} cached, ${each.num_held_blocks} held of ${each.num_blocks}`],
      ...each.groups.map((group) => [group.rule === "state" ? "States" : "Window's blocks",
        `${group.num_free} free, ${group.num_cached} cached, ${group.num_held} held of ${group.num_blocks}`]),
      ...each.tiers.slice(1).map((tier) => [tier.name, tierText(tier)]),
      ...(each.num_encoded_images ? [["images computed", `${each.num_encoded_images}`]] : []),
      ...(each.feature_nbytes ? [["features moved", bytes(each.feature_nbytes)]] : []),
      ["preempted", `${each.num_preemptions} times`],
      ["prefix hits", asked ? `${((100 * each.num_prefix_hit_tokens) / asked).toFixed(0)} % of ${asked} tokens` : "–"],
      ["KV moved", `${bytes(each.kv_sent_nbytes)} sent (${bytes(moves.sent)}/s), ${bytes(each.kv_received_nbytes)} received (${bytes(moves.received)}/s)`],
      ["links", links || "–"],
    ], `Figures of ${each.instance_id}`));
    if (!view.isWhole) return;
    const wanted = isDown(each) ? ["remove"] : each.service === "in" ? ["drain", ...(each.role === "encode" ? [] : ["role"]), "remove"] : ["undrain", "remove"];
    const key = `${wanted} ${each.role}`;
    if (key === this.shown) return; // keeps a button that is being pressed
    this.shown = key;
    this.actions.replaceChildren(
      ...wanted.map((name) => h("button", { type: "button", class: name === "remove" ? "bad" : "", onclick: () => this.ask(name, each) }, COMMANDS[name][0])),
      h("button", { type: "button", onclick: () => this.readLog() }, "Read the log again"),
    );
  }

  ask(name, each) {
    const other = each.role === "prefill" ? "decode" : "prefill";
    const [label, says] = COMMANDS[name];
    const force = h("input", { type: "checkbox", id: "force" });
    const result = h("p");
    const confirm = h("button", { type: "button", class: "main", onclick: async () => {
      confirm.disabled = true;
      const body = name === "undrain" ? {} : { force: force.checked, ...(name === "role" ? { role: other } : {}) };
      try {
        await command(`/instances/${encodeURIComponent(each.instance_id)}/${name}`, body);
        this.asked.replaceChildren(h("p", {}, `${label}: requested.`));
        this.shown = "";
      } catch (error) {
        result.textContent = error.message;
        confirm.disabled = false;
      }
    } }, `${label} ${each.instance_id}`);
    this.asked.replaceChildren(h("div", { class: "confirm" },
      h("p", {}, says(each.instance_id, other)),
      each.unit ? h("p", {}, `The same goes for the rest of its unit, ${each.unit}.`) : null,
      name === "undrain" ? null : h("p", {}, force, " ", h("label", { for: "force" }, "even if it is the last of its role")),
      h("div", { class: "buttons" }, confirm, h("button", { type: "button", onclick: () => this.asked.replaceChildren() }, "Cancel")),
      result));
    confirm.focus();
  }
}
