// The live picture of the cluster: the scheduler, its instances, and the data that flows between them.

import { bytes, h, s, tierText } from "./dom.js";

const BOX = { height: 74, gap: 18 }, TOP = 34, MARGIN = 20, GUTTER = 44;
const WIDE = 1000, NARROW = 400, NUM_NARROW_PX = 560;
const ROLES = ["encode", "prefill", "decode"]; // in the order in which a request uses them
const DOWN = new Set(["failed", "unreachable"]);

export const isDown = (instance) => DOWN.has(instance.state);
const kindOf = (instance) => (isDown(instance) ? "down" : instance.state === "ready" ? "up" : "changing");

export function rates(now, before, passedS) {
  const found = new Map();
  for (const each of now) {
    const old = before?.find((one) => one.instance_id === each.instance_id && one.epoch === each.epoch);
    const rate = (name) => (old && passedS > 0 ? Math.max(0, each[name] - old[name]) / passedS : 0);
    found.set(each.instance_id, { sent: rate("kv_sent_nbytes"), received: rate("kv_received_nbytes"), steps: rate("num_steps") });
  }
  return found;
}

function instanceBox(instance, { x, y }, width, rate, open) {
  const total = Math.max(1, instance.num_blocks);
  const bar = width - 24, most = Math.floor(bar / 5.3);
  const held = (bar * instance.num_held_blocks) / total;
  const cached = (bar * instance.num_cached_blocks) / total;
  const moved = instance.role === "encode" ? `${instance.num_encoded_images} images` : instance.role === "prefill" ? `KV out ${bytes(rate.sent)}/s` : `KV in ${bytes(rate.received)}/s`;
  const work = isDown(instance)
    ? instance.reason ?? instance.state
    : `${instance.num_running} run, ${instance.num_waiting} wait · ${moved}`;
  const name = `${instance.instance_id}: ${instance.state}, ${work}; details`;
  return s(
    "g",
    {
      class: `instance ${kindOf(instance)} ${instance.num_running ? "working" : ""}`, tabindex: "0", role: "button", "aria-label": name, "data-key": instance.instance_id, transform: `translate(${x} ${y})`,
      onclick: () => open(instance.instance_id),
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          open(instance.instance_id);
        }
      },
    },
    s("rect", { class: "box", width, height: BOX.height, rx: 9 }),
    s("circle", { class: "dot", cx: 16, cy: 19, r: 5 }),
    s("text", { x: 28, y: 24 }, `${instance.instance_id} · ${instance.state}`),
    s("text", { x: 12, y: 43, class: "small" }, work.length > most ? `${work.slice(0, most - 1)}…` : work),
    s("rect", { class: "pool", x: 12, y: 54, width: bar, height: 9, rx: 3 }),
    s("rect", { class: "held", x: 12, y: 54, width: held, height: 9 }),
    s("rect", { class: "cached", x: 12 + held, y: 54, width: cached, height: 9 }),
    s("title", {}, [...(instance.unit ? [`rank ${instance.unit_rank} of ${instance.unit}`] : []), `${instance.num_held_blocks} of ${instance.num_blocks} KV blocks held, ${instance.num_cached_blocks} cached`,
      ...instance.tiers.slice(1).map((tier) => `${tier.name}: ${tierText(tier)}`)].join("\n")),
  );
}

// Computes positions: stages are side by side or, on a narrow page, one below the other with links beside them.
function layout(stages, isNarrow) {
  const places = new Map(), titles = [];
  if (isNarrow) {
    let y = 0;
    for (const [title, names] of stages) {
      titles.push([title, GUTTER, (y += 18)]);
      y += 8;
      for (const name of names) {
        places.set(name, { x: GUTTER, y });
        y += BOX.height + BOX.gap / 2;
      }
    }
    return { places, titles, width: NARROW - 2 * GUTTER, height: y };
  }
  const height = TOP + Math.max(...stages.map(([, names]) => names.length)) * (BOX.height + BOX.gap);
  const width = stages.length > 3 ? 200 : 230;
  stages.forEach(([title, names], at) => {
    const x = MARGIN + (at * (WIDE - 2 * MARGIN - width)) / Math.max(1, stages.length - 1);
    titles.push([title, x, 18]);
    names.forEach((name, row) => places.set(name, { x, y: TOP + ((row + 0.5) * (height - TOP)) / names.length - BOX.height / 2 }));
  });
  return { places, titles, width, height };
}

// The path of a link between two boxes. On a narrow page, it runs on their left or right side.
function curve(from, to, width, side) {
  const y1 = from.y + BOX.height / 2, y2 = to.y + BOX.height / 2;
  if (side) {
    const x = side === "left" ? from.x : from.x + width, out = side === "left" ? x - GUTTER * 1.2 : x + GUTTER * 1.2;
    return `M${x} ${y1} C${out} ${y1} ${out} ${y2} ${x} ${y2}`;
  }
  const middle = (from.x + width + to.x) / 2;
  return `M${from.x + width} ${y1} C${middle} ${y1} ${middle} ${y2} ${to.x} ${y2}`;
}

export function picture(overview, rate, open, numPx) {
  const isNarrow = numPx < NUM_NARROW_PX;
  const byRole = new Map(ROLES.map((role) => [role, []]));
  for (const each of overview.instances) (byRole.get(each.role) ?? byRole.get("decode")).push(each);
  const present = ROLES.filter((role) => byRole.get(role).length);
  const stages = [["clients →", [""]], ...present.map((role) => [role, byRole.get(role).map((each) => each.instance_id)])];
  const { places, titles, width, height } = layout(stages, isNarrow);
  const lines = [], last = overview.samples.at(-1), asks = (last?.prompt_tokens_per_s ?? 0) > 0;
  const link = (from, to, kind, side, title) => {
    const line = s("path", { class: kind, d: curve(places.get(from), places.get(to), width, isNarrow ? side : null) });
    line.append(s("title", {}, title));
    lines.push(line);
  };
  for (const each of byRole.get(present[0]) ?? []) {
    const busy = asks || each.num_running + each.num_waiting > 0 || rate.get(each.instance_id).steps > 0;
    link("", each.instance_id, isDown(each) ? "broken" : busy ? "flowing" : "", "left", `scheduler to ${each.instance_id}`);
  }
  const pairs = present.slice(0, -1).flatMap((role, at) => byRole.get(role).flatMap((from) => byRole.get(present[at + 1]).map((to) => [from, to])));
  for (const [from, to] of pairs) {
    const state = Object.entries(from.links).find(([peer]) => peer.split("@")[0] === to.instance_id)?.[1] ?? "none";
    const flows = rate.get(from.instance_id).sent > 0 && rate.get(to.instance_id).received > 0;
    const kind = isDown(from) || isDown(to) ? "broken" : state.startsWith("up") ? (flows ? "flowing" : "") : state === "resting" ? "resting" : "broken";
    link(from.instance_id, to.instance_id, kind, "right", `${from.instance_id} to ${to.instance_id}: ${state}`);
  }
  const at = places.get("");
  const scheduler = s(
    "g", { transform: `translate(${at.x} ${at.y})` },
    s("rect", { class: "box", width, height: BOX.height, rx: 9 }),
    s("circle", { class: "dot", cx: 16, cy: 19, r: 5 }),
    s("text", { x: 28, y: 24 }, "scheduler"),
    s("text", { x: 12, y: 43, class: "small" }, `${overview.num_running} requests, ${overview.num_queued} queued`),
    s("text", { x: 12, y: 61, class: "small" }, `${last ? Math.round(last.tokens_per_s) : 0} tokens/s out`),
  );
  const boxes = overview.instances.map((each) => instanceBox(each, places.get(each.instance_id), width, rate.get(each.instance_id), open));
  return h(
    "div", { class: "picture" },
    s("svg", { viewBox: `0 0 ${isNarrow ? NARROW : WIDE} ${height}`, role: "group", "aria-label": "The cluster's processes and links" },
      ...titles.map(([text, x, y]) => s("text", { x, y, class: "small" }, text)), ...lines, scheduler, ...boxes),
  );
}
