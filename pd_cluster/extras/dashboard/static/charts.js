// Charts of the last minutes, with marks where instances died and returned; uPlot draws them.

import { clock, h } from "./dom.js";

const HEIGHT = 165;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function marksPlugin(marksOf) {
  const draw = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 2;
    for (const mark of marksOf()) {
      const x = plot.valToPos(mark.at_s, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(mark.kind === "down" ? "--bad" : mark.kind === "up" ? "--good" : "--warn");
      ctx.setLineDash(mark.kind === "down" ? [] : [4, 4]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
  return { hooks: { drawAxes: draw } };
}

export class Chart {
  // `lines`: [key of a sample, label, colour, factor]. `goal`: a value to draw as a line, or null.
  constructor(title, unit, lines, marksOf, goal = null) {
    this.lines = lines;
    this.goal = goal;
    this.box = h("div", { class: "chart" });
    this.summary = h("ul", { class: "legend" });
    this.element = h("section", { class: "third" }, h("h2", {}, title), this.box, this.summary);
    this.box.setAttribute("role", "img");
    this.title = title;
    this.unit = unit;
    this.marksOf = marksOf;
    this.plot = null;
  }

  make() {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const series = this.lines.map(([, label, name]) => ({ label, stroke: colour(name), width: 2, points: { show: false } }));
    if (this.goal !== null) series.push({ label: "goal", stroke: colour("--bad"), width: 1, dash: [6, 4], points: { show: false } });
    this.plot?.destroy();
    this.plot = new uPlot({
      width: Math.max(200, this.box.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false },
      axes: [{ ...axis, size: 28, space: 70, values: (_, values) => values.map(clock) }, { ...axis, size: 58, values: (_, values) => values.map((value) => `${+value.toFixed(3)} ${this.unit}`) }],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      series: [{}, ...series],
      plugins: [marksPlugin(this.marksOf)],
    }, this.data ?? [[], ...series.map(() => [])], this.box);
  }

  show(samples) {
    const x = samples.map((sample) => sample.at_s);
    const ys = this.lines.map(([key, , , factor = 1]) => samples.map((sample) => (sample[key] === null ? null : sample[key] * factor)));
    this.data = [x, ...ys, ...(this.goal === null ? [] : [x.map(() => this.goal)])];
    const last = this.lines.map(([, label, name], at) => {
      const value = ys[at][x.length - 1];
      return [`${label} ${value === null || value === undefined ? "–" : `${+value.toFixed(value < 10 ? 1 : 0)} ${this.unit}`}`, name.slice(2)];
    });
    if (this.goal !== null) last.push([`goal ${this.goal} ${this.unit}`, "bad"]);
    this.summary.replaceChildren(...last.map(([text, name]) => h("li", { class: name }, text)));
    this.box.setAttribute("aria-label", `${this.title}, now: ${last.map(([text]) => text).join(", ")}`);
    if (this.plot === null) this.make();
    else if (Math.abs(this.plot.width - this.box.clientWidth) > 4) this.plot.setSize({ width: Math.max(200, this.box.clientWidth), height: HEIGHT });
    this.plot.setData(this.data);
  }
}
