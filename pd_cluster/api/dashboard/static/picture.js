// The cluster as a living picture: scheduler, prefill and decode instances, and what flows between them.

import { bytes, h, s } from "./dom.js";

const WIDTH = 1000, BOX = { width: 230, height: 74, gap: 18 }, TOP = 34;
const COLUMNS = { scheduler: 20, prefill: 330, decode: 700 };
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

function instanceBox(instance, x, y, rate, open) {
  const total = Math.max(1, instance.num_blocks);
  const bar = BOX.width - 24;
  const held = (bar * instance.num_held_blocks) / total;
  const cached = (bar * instance.num_cached_blocks) / total;
  const moved = instance.role === "prefill" ? `KV out ${bytes(rate.sent)}/s` : `KV in ${bytes(rate.received)}/s`;
  const work = isDown(instance)
    ? instance.reason ?? instance.state
    : `${instance.num_running} run, ${instance.num_waiting} wait · ${moved}`;
  const name = `${instance.instance_id}: ${instance.state}, ${work}; details`;
  return s(
    "g",
    {
      class: `instance ${kindOf(instance)} ${instance.num_running ? "working" : ""}`, tabindex: "0", role: "button", "aria-label": name, transform: `translate(${x} ${y})`,
      onclick: () => open(instance.instance_id),
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          open(instance.instance_id);
        }
      },
    },
    s("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 9 }),
    s("circle", { class: "dot", cx: 16, cy: 19, r: 5 }),
    s("text", { x: 28, y: 24 }, `${instance.instance_id} · ${instance.state}`),
    s("text", { x: 12, y: 43, class: "small" }, work.length > 40 ? `${work.slice(0, 39)}…` : work),
    s("rect", { class: "pool", x: 12, y: 54, width: bar, height: 9, rx: 3 }),
    s("rect", { class: "held", x: 12, y: 54, width: held, height: 9 }),
    s("rect", { class: "cached", x: 12 + held, y: 54, width: cached, height: 9 }),
    s("title", {}, `${instance.num_held_blocks} of ${instance.num_blocks} KV blocks held, ${instance.num_cached_blocks} cached`),
  );
}

function curve(x1, y1, x2, y2, kind) {
  const middle = (x1 + x2) / 2;
  return s("path", { class: kind, d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
}

export function picture(overview, rate, open) {
  const columns = { prefill: [], decode: [] };
  for (const each of overview.instances) (columns[each.role] ?? columns.decode).push(each);
  const rows = Math.max(1, columns.prefill.length, columns.decode.length);
  const height = TOP + rows * (BOX.height + BOX.gap);
  const place = (list, at) => TOP + ((at + 0.5) * (height - TOP)) / list.length - BOX.height / 2;
  const middle = TOP + (height - TOP) / 2;
  const lines = [], boxes = [];
  const last = overview.samples.at(-1);
  for (const role of ["prefill", "decode"]) {
    columns[role].forEach((each, at) => {
      const y = place(columns[role], at) + BOX.height / 2;
      const busy = each.num_running + each.num_waiting > 0 || rate.get(each.instance_id).steps > 0;
      if (role === "prefill") lines.push(curve(COLUMNS.scheduler + BOX.width, middle, COLUMNS.prefill, y, busy ? "flowing" : isDown(each) ? "broken" : ""));
      boxes.push(instanceBox(each, COLUMNS[role], place(columns[role], at), rate.get(each.instance_id), open));
    });
  }
  columns.prefill.forEach((from, a) => columns.decode.forEach((to, b) => {
    const state = Object.entries(from.links).find(([peer]) => peer.split("@")[0] === to.instance_id)?.[1] ?? "none";
    const flows = rate.get(from.instance_id).sent > 0 && rate.get(to.instance_id).received > 0;
    const kind = state.startsWith("up") ? (flows ? "flowing" : "") : state === "resting" ? "resting" : "broken";
    const y1 = place(columns.prefill, a) + BOX.height / 2, y2 = place(columns.decode, b) + BOX.height / 2;
    const line = curve(COLUMNS.prefill + BOX.width, y1, COLUMNS.decode, y2, kind);
    line.append(s("title", {}, `${from.instance_id} to ${to.instance_id}: ${state}`));
    lines.push(line);
  }));
  const scheduler = s(
    "g", { transform: `translate(${COLUMNS.scheduler} ${middle - BOX.height / 2})` },
    s("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 9 }),
    s("circle", { class: "dot", cx: 16, cy: 19, r: 5 }),
    s("text", { x: 28, y: 24 }, "scheduler"),
    s("text", { x: 12, y: 43, class: "small" }, `${overview.num_running} requests, ${overview.num_queued} queued`),
    s("text", { x: 12, y: 61, class: "small" }, `${last ? Math.round(last.tokens_per_s) : 0} tokens/s out`),
  );
  const titles = Object.entries({ scheduler: "clients →", prefill: "prefill", decode: "decode" })
    .map(([name, text]) => s("text", { x: COLUMNS[name], y: 18, class: "small" }, text));
  return h(
    "div", { class: "picture" },
    s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": "The cluster's processes and links" }, ...titles, ...lines, scheduler, ...boxes),
  );
}
