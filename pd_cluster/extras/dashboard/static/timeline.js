// One request's path: where its prompt was computed, how much KV cache was found or moved, where tokens came from.

import { bytes, h, s } from "./dom.js";

const WIDTH = 960, LEFT = 190, LANE = 30;

function span(events, start, stop, end) {
  const first = events.find((event) => event.what === start);
  if (!first) return [];
  const last = events.find((event) => event.what === stop && event.at_ms >= first.at_ms);
  return [[first.at_ms, last ? last.at_ms : end]];
}

const pieces = (events, what) => events
  .filter((event) => event.what === what)
  .map((event) => [event.at_ms - (event.numbers.took_us ?? 0) / 1000, event.at_ms]);

const sum = (events, what, read) => events.filter((event) => event.what === what).reduce((total, event) => total + read(event.numbers), 0);

export function describe(timeline) {
  const of = (name) => timeline.events.filter((event) => event.who === name);
  const p = of(timeline.prefill), d = of(timeline.decode);
  const cached = p.find((event) => event.what === "admitted")?.numbers.num_cached ?? 0;
  const moved = sum(d, "landed", (numbers) => numbers.nbytes ?? 0);
  const { num_tokens: decoded, num_drafted: drafted, num_accepted: accepted } = d.find((event) => event.what === "finished")?.numbers ?? {};
  const alone = timeline.prefill === timeline.decode;
  const parts = [`${timeline.num_prompt_tokens} prompt tokens, ${cached} of them cached on ${timeline.prefill}`];
  if (alone) parts.push(`all tokens from ${timeline.prefill}`);
  else parts.push(`${bytes(moved)} of KV cache moved to ${timeline.decode}`, `token 1 from ${timeline.prefill}`, `the others${decoded ? ` (${decoded} in all)` : ""} from ${timeline.decode}`);
  if (drafted) parts.push(`${accepted} of ${drafted} drafted tokens accepted`);
  const replays = timeline.events.filter((event) => event.what === "replayed").length;
  if (replays) parts.push(`continued elsewhere ${replays} time${replays > 1 ? "s" : ""}`);
  if (timeline.error) parts.push(`failed: ${timeline.error}`);
  return parts.join("; ");
}

export function drawTimeline(timeline) {
  const of = (name) => timeline.events.filter((event) => event.who === name);
  const own = of("scheduler"), p = of(timeline.prefill), d = of(timeline.decode);
  const end = Math.max(1, ...timeline.events.map((event) => event.at_ms));
  const lanes = [
    ["scheduler: queue", "scheduler", span(own, "received", "routed", end)],
    [`${timeline.prefill}: queue`, "scheduler", span(p, "submitted", "admitted", end)],
    [`${timeline.prefill}: compute`, "prefill", pieces(p, "chunk")],
    [`${timeline.prefill}: KV sent`, "kv", pieces(p, "sent")],
    [`${timeline.decode}: KV landed`, "kv", pieces(d, "landed")],
    [`${timeline.decode}: decode`, "decode", span(d, "decode start", "finished", end)],
  ].filter(([, , bars]) => bars.length);
  const height = lanes.length * LANE + 40;
  const at = (ms) => LEFT + (Math.max(0, ms) / end) * (WIDTH - LEFT - 20);
  const shapes = lanes.flatMap(([label, kind, bars], row) => [
    s("text", { x: 0, y: row * LANE + 20 }, label),
    s("rect", { class: "lane", x: LEFT, y: row * LANE + 6, width: WIDTH - LEFT - 20, height: LANE - 10, rx: 3 }),
    ...bars.map(([from, to]) => s("rect", { class: kind, x: at(from), y: row * LANE + 6, width: Math.max(2, at(to) - at(from)), height: LANE - 10, rx: 2 },
      s("title", {}, `${from.toFixed(1)} to ${to.toFixed(1)} ms`))),
  ]);
  const first = own.find((event) => event.what === "first token");
  const marks = [...(first ? [[first.at_ms, `first token ${first.at_ms.toFixed(0)} ms`]] : []), [end, `end ${end.toFixed(0)} ms`]];
  const labels = marks.map(([ms, text], index) => s("text", { class: "small", x: at(ms), y: lanes.length * LANE + 14 + 15 * index, "text-anchor": ms > end * 0.7 ? "end" : "start" }, text));
  const lines = marks.map(([ms]) => s("rect", { class: "bad", x: at(ms), y: 0, width: 1, height: lanes.length * LANE + 4 }));
  return h(
    "div", { class: "timeline" },
    s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": describe(timeline) }, ...shapes, ...lines, ...labels),
    h("p", { class: "quiet" }, `${describe(timeline)}.`),
  );
}
