/** Charts of lines: loss, throughput and gradient norm of every replica, with mean, total and the band over all. */
import { cssColor, faint, replicaColor } from "../colors.js";
import { csvUrl } from "../api.js";
import { fill, h, segmented } from "../dom.js";
import { METRICS } from "../format.js";
import { hiddenOf, set, state, xRange } from "../state.js";
import { Card } from "./card.js";
import { band, KEYS_HELP, paintMarks, Plot } from "./plot.js";
import { binsOf, expand, middleX, pairedX, pairedY, positive, repeatedY, smooth, stack } from "./series.js";
import { hideTooltip, showTooltip, thinRows } from "./tooltip.js";

const MODES = [
  [
    "replicas",
    "Per replica",
    "A line for each replica, with their mean and the band from lowest to highest",
  ],
  ["stacked", "Stacked", "Replicas stacked: the upper edge is their total"],
  ["total", "Total", "All replicas together"],
];

export class LinesChart {
  constructor(panel, kind, tag) {
    this.panel = panel;
    this.kind = kind;
    this.tag = tag;
    this.text = METRICS[tag].text;
    this.focused = null;
    this.modes =
      kind === "throughput"
        ? segmented("Show throughput", MODES, state.throughput, (mode) => set({ throughput: mode }))
        : null;
    this.card = new Card({
      kind,
      title: METRICS[tag].title,
      about: panel.about,
      controls: this.modes ? [this.modes.element] : [],
      csv: () => ({ url: csvUrl(panel.name, tag, panel.range(), hiddenOf(panel.name)) }),
      png: () => ({ canvases: [this.plot.u.ctx.canvas], legend: this.legend(), caption: panel.axisCaption() }),
    });
    this.plot = new Plot({
      label: "",
      height: 260,
      oncursor: (index, u) => this.read(index, u),
      onfocus: (one) => (this.focused = one?.replica ?? null),
    });
    this.card.body.append(this.plot.element);
    this.key = h("div", { class: "part-legend" });
    this.card.footer.append(this.key);
  }

  get element() {
    return this.card.element;
  }

  get mode() {
    return this.kind === "throughput" ? state.throughput : "replicas";
  }

  get log() {
    return state.log && this.mode !== "stacked"; // areas on a log scale have no meaning
  }

  show(response) {
    this.response = response;
    const count = response.steps.length;
    this.lines = new Map(response.replicas.map((line) => [line.id, expand(line, count)]));
    this.overall = Object.fromEntries(
      Object.entries(response.overall).map(([name, line]) => [name, expand(line, count)]),
    );
    this.redraw();
  }

  visible() {
    const hidden = hiddenOf(this.panel.name);
    return [...this.lines.keys()].filter((id) => !hidden.has(id));
  }

  /** The lowest and the highest value of anything that is drawn in the part of the axis in view. */
  extent() {
    if (!this.drawing) return null;
    const { x, series } = this.drawing;
    const [low, high] = xRange();
    const from = Math.max(0, x.findIndex((position) => position >= low) - 1);
    const to = x.findLastIndex((position) => position <= high) + 2;
    return extentOf(series.map((one) => one.values.slice(from, to)));
  }

  redraw() {
    if (!this.response) return;
    this.modes?.set(state.throughput);
    if (!this.lines.size && !Object.keys(this.overall).length) {
      return this.card.setStatus("empty", `No ${METRICS[this.tag].title.toLowerCase()} in this log.`);
    }
    this.card.setStatus("");
    this.bins = binsOf(this.response, state.axis);
    const drawing = {
      replicas: () => this.drawReplicas(),
      stacked: () => this.drawStacked(),
      total: () => this.drawTotal(),
    }[this.mode]();
    if (this.log) drawing.series.forEach((one) => (one.values = positive(one.values)));
    drawing.y = { text: this.text, log: this.log, zero: this.mode !== "replicas", ...drawing.y };
    drawing.y.union = () => this.panel.union(this);
    drawing.paint = (u) => paintMarks(u, this.panel.findingMarks(), this.crosses());
    this.drawing = drawing;
    this.plot.element.setAttribute("aria-label", this.label());
    this.plot.draw(drawing);
    this.drawKey();
  }

  /** What the lines are that are not in the legend of replicas. */
  drawKey() {
    const entries = [];
    if (this.mode === "replicas" && this.lines.size > 1) {
      if (this.overall.mean) entries.push(["line", cssColor("--ink"), `mean of all replicas${this.derived("mean")}`]);
      if (this.overall.min)
        entries.push(["area", faint(cssColor("--band"), 0.3), `lowest to highest${this.derived("min")}`]);
    }
    if (this.mode === "total")
      entries.push(["line", replicaColor(0, 1), `all replicas together${this.derived("total")}`]);
    if (this.mode === "stacked")
      entries.push([
        "",
        "",
        `the upper edge is the total of the visible replicas${state.log ? "; linear, as a log scale has no meaning for stacked areas" : ""}`,
      ]);
    if (this.crosses().length) entries.push(["", "", "✕ not a finite number"]);
    fill(
      this.key,
      entries.map(([shape, color, text]) =>
        h(
          "span",
          { class: "swatch-label" },
          shape ? h("span", { class: `swatch ${shape}`, style: { background: color } }) : null,
          text,
        ),
      ),
    );
  }

  derived(statistic) {
    return this.response.overall[statistic]?.source === "derived" ? " (computed from the points that TensorBoard kept)" : "";
  }

  drawReplicas() {
    const ids = this.visible();
    const many = this.panel.replicas.length > 8;
    const paired = !this.response.exact && !state.smoothing;
    const bins = this.bins;
    const x = paired ? pairedX(bins) : middleX(bins);
    const at = (values) => (paired ? repeatedY(bins, values) : values);
    const series = [];
    const bands = [];
    const { mean, min, max } = this.overall;
    const withBand = min && max && this.lines.size > 1;
    if (withBand) {
      series.push({ name: "highest", values: at(max.mean), color: cssColor("--ink-soft"), hidden: true });
      series.push({ name: "lowest", values: at(min.mean), color: cssColor("--ink-soft"), hidden: true });
      bands.push(band(0, 1, cssColor("--band"), 0.2));
    }
    for (const id of ids) {
      const line = this.lines.get(id);
      const color = this.panel.color(id);
      const look = { replica: id, color, width: many ? 1 : 1.5, focus: true, alpha: many ? 0.75 : 1 };
      if (state.smoothing && !many) {
        series.push({
          name: `replica ${id} unsmoothed`,
          values: line.mean,
          color: faint(color, 0.22),
          width: 1,
        });
      }
      series.push({
        name: `replica ${id}`,
        values: paired ? pairedY(bins, line) : smooth(line.mean, state.smoothing),
        ...look,
      });
    }
    if (mean && this.lines.size > 1) {
      series.push({
        name: "mean",
        values: at(smooth(mean.mean, state.smoothing)),
        color: cssColor("--ink"),
        width: 2,
        focus: true,
      });
    }
    return { x, series, bands };
  }

  drawStacked() {
    const ids = this.visible();
    const tops = stack(
      ids.map((id) => smooth(this.lines.get(id).mean, state.smoothing)),
      this.bins.first.length,
    );
    const series = ids.map((id, i) => ({
      name: `replica ${id}`,
      replica: id,
      values: tops[i],
      color: this.panel.color(id),
      width: ids.length > 16 ? 0.5 : 1,
      focus: true,
    }));
    series.reverse(); // the band of each goes down to the next one
    const bands = series.slice(1).map((_, i) => band(i, i + 1, series[i].color, 0.55));
    if (series.length) series.at(-1).fill = faint(series.at(-1).color, 0.55);
    return { x: middleX(this.bins), series, bands };
  }

  drawTotal() {
    const total = this.overall.total ?? { mean: [], low: [], high: [] };
    const color = replicaColor(0, 1);
    const paired = !this.response.exact && !state.smoothing;
    const series = [];
    if (state.smoothing)
      series.push({ name: "total unsmoothed", values: total.mean, color: faint(color, 0.25), width: 1 });
    series.push({
      name: "total",
      values: paired ? pairedY(this.bins, total) : smooth(total.mean, state.smoothing),
      color,
      width: 1.75,
      focus: true,
      fill: faint(color, 0.12),
    });
    return { x: paired ? pairedX(this.bins) : middleX(this.bins), series };
  }

  /** Where values were not finite. */
  crosses() {
    const found = [];
    for (const id of this.visible()) {
      for (const bin of this.lines.get(id).bad.keys())
        found.push({ position: this.bins.first[bin], color: this.panel.color(id) });
    }
    return found;
  }

  binAt(position) {
    const { first, last } = this.bins;
    let [low, high] = [0, first.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (first[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low + 1 < first.length && position > last[low] && first[low + 1] - position < position - last[low]
      ? low + 1
      : low;
  }

  read(index, u) {
    if (index === null || !this.response.steps.length) {
      this.card.readout.textContent = "";
      if (!this.plot.hovered) hideTooltip();
      return;
    }
    const bin = this.binAt(u.data[0][index]);
    const title = this.panel.binTitle(this.response, bin);
    const value = (line) => line?.bad.get(bin) ?? line?.mean[bin];
    const text = (number) => (number === undefined || number === null ? "–" : this.text(number));
    const { mean, min, max, total } = this.overall;
    const parts = [title];
    if (this.kind === "throughput" && total) parts.push(`total ${text(value(total))}`);
    if (this.lines.size > 1 && mean) parts.push(`mean ${text(value(mean))}`);
    if (this.lines.size > 1 && min && max) parts.push(`${text(min.mean[bin])} – ${text(max.mean[bin])}`);
    if (this.lines.size === 1) parts.push(text(value([...this.lines.values()][0])));
    this.card.readout.textContent = parts.join("  ·  ");
    if (!this.plot.hovered) return;
    const rows = this.visible().map((id) => ({
      color: this.panel.color(id),
      name: `replica ${id}`,
      number: value(this.lines.get(id)),
      strong: id === this.focused,
    }));
    rows.sort((a, b) => order(b.number) - order(a.number));
    rows.forEach((row) => (row.value = text(row.number)));
    const extra = [];
    if (this.kind === "throughput" && total) extra.push({ name: "total", value: text(value(total)) });
    if (this.lines.size > 1 && mean) extra.push({ name: "mean", value: text(value(mean)) });
    showTooltip(u, title, [...extra, ...thinRows(rows)]);
  }

  highlight(replica) {
    const index = this.drawing?.series.findIndex((one) => one.replica === replica) ?? -1;
    this.plot.focusSeries(replica === null || index < 0 ? null : index);
  }

  zoom() {
    this.plot.zoom();
  }

  legend() {
    const lines =
      this.mode === "total" ? [] : this.visible().map((id) => ({ color: this.panel.color(id), text: `replica ${id}` }));
    if (this.mode === "replicas" && this.lines.size > 1) {
      lines.push(
        { color: cssColor("--ink"), text: "mean" },
        { color: faint(cssColor("--band"), 0.3), text: "lowest to highest" },
      );
    }
    return lines;
  }

  label() {
    const what = {
      replicas: `${METRICS[this.tag].title} of ${this.visible().length} replicas`,
      stacked: "Examples per second, replicas stacked",
      total: "Examples per second of all replicas",
    }[this.mode];
    return `${what}. ${KEYS_HELP}`;
  }

  /** What is drawn, for tests and the console. */
  drawn() {
    if (!this.drawing) return null;
    const { x, series } = this.drawing;
    return {
      kind: this.kind,
      mode: this.mode,
      axis: state.axis,
      view: this.plot.view(),
      log: this.log,
      exact: this.response.exact,
      x: [...x],
      series: series.map(({ name, replica, values, color }) => ({
        name,
        replica,
        color,
        values: [...values].map((value) => value ?? null),
      })),
      crosses: this.crosses().map(({ position }) => position),
    };
  }

  destroy() {
    this.plot.destroy();
  }
}

/** NaN and what is missing sort below every number. */
const order = (value) => (typeof value === "number" ? value : value === "Infinity" ? Infinity : -Infinity);

function extentOf(columns) {
  let [low, high] = [Infinity, -Infinity];
  for (const values of columns) {
    for (const value of values) {
      if (typeof value !== "number") continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}
