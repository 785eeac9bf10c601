/** The heat map: a row per replica, time from left to right, colour for the seconds of a step. */
import { csvUrl } from "../api.js";
import { cssColor, heatColor, heatGradient } from "../colors.js";
import { fill, h, segmented } from "../dom.js";
import { METRICS, seconds } from "../format.js";
import { hiddenOf, set, state } from "../state.js";
import { slowestOf } from "../tiles.js";
import { Card } from "./card.js";
import { KEYS_HELP, paintMarks, Plot } from "./plot.js";
import { binsOf, carry, expand } from "./series.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const TAGS = [
  ["replica/step_seconds", "Step", "The whole step, including waiting for other replicas"],
  ["replica/compute_seconds", "Compute", "Forward and backward pass"],
  ["replica/input_seconds", "Input", "Waiting for input"],
  ["replica/sync_seconds", "Sync", "All-reduce and update, including waiting for other replicas"],
];

export class Heatmap {
  constructor(panel) {
    this.panel = panel;
    this.kind = "heatmap";
    const tags = TAGS.filter(([tag]) => panel.tags.has(tag));
    this.modes = segmented("Show seconds of", tags, state.heat, (tag) => set({ heat: tag }));
    this.legend = h("div", { class: "heat-legend" });
    this.card = new Card({
      kind: "heatmap",
      title: "Step time by replica",
      about: panel.about,
      controls: tags.length > 1 ? [this.modes.element] : [],
      csv: () => ({ url: csvUrl(panel.name, this.tag, panel.range(), hiddenOf(panel.name)) }),
      png: () => ({ canvases: [this.plot.u.ctx.canvas, this.scaleCanvas()], caption: panel.axisCaption() }),
    });
    this.plot = new Plot({ label: "", height: 200, oncursor: (index, u) => this.read(index, u) });
    this.card.body.append(this.plot.element);
    this.hint = h("p", { class: "note heat-hint" });
    this.card.footer.append(this.legend, this.hint);
  }

  get element() {
    return this.card.element;
  }

  get tag() {
    return this.panel.tags.has(state.heat) ? state.heat : "replica/step_seconds";
  }

  show(response) {
    this.response = response;
    const lines = response.replicas.map((line) => [line.id, expand(line, response.steps.length)]);
    this.lines = new Map(lines.map(([id, line]) => [id, { ...line, cells: carry(line.mean) }]));
    this.redraw();
  }

  rows() {
    const hidden = hiddenOf(this.panel.name);
    return [...this.lines.keys()].filter((id) => !hidden.has(id));
  }

  redraw() {
    if (!this.response) return;
    this.modes.set(this.tag);
    this.card.setTitle(`${METRICS[this.tag].title} by replica`);
    if (!this.lines.size) return this.card.setStatus("empty", "No step times in this log.");
    this.card.setStatus("");
    this.bins = binsOf(this.response, state.axis);
    const rows = this.rows();
    this.scale = this.panel.union(this) ?? this.extent() ?? [0, 1, 1];
    this.plot.setHeight(
      Math.max(96, Math.min(28, Math.max(7, Math.floor(380 / Math.max(1, rows.length)))) * rows.length + 46),
    );
    const every = Math.ceil(rows.length / Math.max(1, Math.floor((this.plot.height - 46) / 13)));
    this.drawing = {
      x: this.bins.first,
      series: [{ name: "", values: this.bins.first.map(() => null), color: "transparent", hidden: true }],
      y: {
        dir: -1,
        size: 44,
        range: () => [-0.5, Math.max(1, rows.length) - 0.5],
        splits: () => rows.map((_, row) => row).filter((row) => row % every === 0),
        text: (row) => String(rows[row] ?? ""),
      },
      paint: (u) => this.paint(u, rows),
    };
    this.plot.element.setAttribute(
      "aria-label",
      `${METRICS[this.tag].title} of ${rows.length} replicas as a heat map. ${KEYS_HELP}`,
    );
    this.plot.draw(this.drawing);
    this.drawLegend();
    this.advise();
  }

  /** The range of the colours, in seconds. Rare peaks (the first step compiles) must not hide other differences. */
  extent() {
    if (!this.lines) return null;
    const all = [];
    for (const id of this.rows())
      for (const value of this.lines.get(id).mean) if (typeof value === "number") all.push(value);
    if (!all.length) return null;
    const sorted = Float64Array.from(all).sort();
    const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
    const low = at(0.02);
    // Nor must noise of a few percent look like a difference.
    const high = Math.max(low * 1.1, Math.min(sorted.at(-1), Math.max(at(0.98), 2 * at(0.5))));
    return [low, high, sorted.at(-1)];
  }

  share(value) {
    const [low, high] = this.scale;
    return high > low ? (value - low) / (high - low) : 0;
  }

  paint(u, rows) {
    const { ctx, bbox } = u;
    const { first, last } = this.bins;
    const [viewLow, viewHigh] = [u.scales.x.min, u.scales.x.max];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = cssColor("--empty");
    ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
    const edges = this.edges().map((position) => Math.round(u.valToPos(position, "x", true)));
    const height = bbox.height / Math.max(1, rows.length);
    const gap = height > 10 * devicePixelRatio ? devicePixelRatio : 0;
    rows.forEach((id, row) => {
      const { cells } = this.lines.get(id);
      const [y, next] = [Math.round(bbox.top + row * height), Math.round(bbox.top + (row + 1) * height)];
      for (let bin = 0; bin < first.length; bin++) {
        if (last[bin] < viewLow && edges[bin + 1] < bbox.left) continue;
        if (first[bin] > viewHigh && edges[bin] > bbox.left + bbox.width) break;
        const value = cells[bin];
        if (typeof value !== "number") continue;
        ctx.fillStyle = heatColor(this.share(value));
        ctx.fillRect(edges[bin], y, Math.max(1, edges[bin + 1] - edges[bin]), next - y - gap);
      }
    });
    ctx.restore();
    paintMarks(u, this.panel.findingMarks(), []);
  }

  /** Where cells begin and end: half-way between neighbours. */
  edges() {
    const { first, last } = this.bins;
    const count = first.length;
    if (count === 1) return [first[0] - 0.5, last[0] + 0.5];
    const edges = first.map((position, bin) =>
      bin ? (position + last[bin - 1]) / 2 : position - (first[1] - last[0]) / 2,
    );
    edges.push(last[count - 1] + (first[count - 1] - last[count - 2]) / 2);
    return edges;
  }

  drawLegend() {
    const [low, high, most] = this.scale;
    const open = most > high * 1.0001;
    fill(
      this.legend,
      h("span", { class: "heat-word" }, "fast"),
      h(
        "div",
        { class: "heat-scale" },
        h("div", { class: "heat-bar", style: { background: heatGradient() } }),
        h(
          "div",
          { class: "heat-ticks" },
          [0, 0.25, 0.5, 0.75, 1].map((share) =>
            h("span", {}, (share === 1 && open ? "≥ " : "") + seconds(low + share * (high - low))),
          ),
        ),
      ),
      h("span", { class: "heat-word" }, "slow"),
      open ? h("span", { class: "heat-word" }, `up to ${seconds(most)}`) : null,
      h(
        "span",
        { class: "swatch-label" },
        h("span", { class: "swatch", style: { background: cssColor("--empty") } }),
        "no data",
      ),
    );
  }

  /** Replicas that train in step wait for the slowest, so that all of their steps take equally long. */
  advise() {
    const slowest = this.panel.summary && slowestOf(this.panel.summary);
    const hides =
      slowest &&
      slowest.relative < 0.9 &&
      this.tag === "replica/step_seconds" &&
      this.panel.tags.has("replica/compute_seconds");
    fill(
      this.hint,
      hides
        ? [
            "Step times include waiting for the slowest replica. ",
            `Replica ${slowest.id} has the longest busy time: `,
            h(
              "button",
              { type: "button", class: "link", onclick: () => set({ heat: "replica/compute_seconds" }) },
              "check compute",
            ),
          ]
        : null,
    );
  }

  /** The legend again, for the PNG. */
  scaleCanvas() {
    const [unit, [low, high]] = [devicePixelRatio, this.scale];
    const canvas = h("canvas", { width: this.plot.u.ctx.canvas.width, height: 40 * unit });
    const ctx = canvas.getContext("2d");
    for (let x = 0; x < 240; x++) {
      ctx.fillStyle = heatColor(x / 239);
      ctx.fillRect((44 + x) * unit, 8 * unit, unit + 1, 10 * unit);
    }
    ctx.fillStyle = cssColor("--ink-soft");
    ctx.font = `${11 * unit}px Roboto, "Segoe UI", system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const share of [0, 0.5, 1])
      ctx.fillText(seconds(low + share * (high - low)), (44 + share * 240) * unit, 32 * unit);
    return canvas;
  }

  read(index, u) {
    if (index === null || !this.response.steps.length) {
      this.card.readout.textContent = "";
      if (!this.plot.hovered) hideTooltip();
      return;
    }
    const title = this.panel.binTitle(this.response, index);
    const rows = this.rows();
    const values = rows.map((id) => this.lines.get(id).cells[index]);
    const known = values.filter((value) => typeof value === "number");
    const [least, most] = [Math.min(...known), Math.max(...known)];
    const slowest = most > least * 1.02 ? `  ·  slowest: replica ${rows[values.indexOf(most)]}` : "";
    this.card.readout.textContent = known.length
      ? `${title}  ·  ${seconds(least)} – ${seconds(most)}${slowest}`
      : title;
    if (!this.plot.hovered || u.cursor.top < 0) return;
    const row = Math.min(rows.length - 1, Math.max(0, Math.round(u.posToVal(u.cursor.top, "y"))));
    const [id, line] = [rows[row], this.lines.get(rows[row])];
    if (!line) return;
    const text = (value) => (typeof value === "number" ? seconds(value) : "–");
    const extra =
      this.response.exact || typeof line.mean[index] !== "number"
        ? []
        : [
            { name: "shortest", value: text(line.low[index]) },
            { name: "longest", value: text(line.high[index]) },
          ];
    const value = line.bad.get(index) ?? values[row];
    showTooltip(u, title, [
      {
        color: typeof value === "number" ? heatColor(this.share(value)) : null,
        name: `replica ${id}`,
        value: typeof value === "string" ? value : text(value),
        strong: true,
      },
      ...extra,
      { name: this.panel.deviceOf(id), value: "" },
    ]);
  }

  highlight() {}

  zoom() {
    this.plot.zoom();
  }

  /** What is drawn, for tests and the console. */
  drawn() {
    if (!this.drawing) return null;
    return {
      kind: this.kind,
      tag: this.tag,
      axis: state.axis,
      view: this.plot.view(),
      exact: this.response.exact,
      x: [...this.bins.first],
      scale: this.scale,
      series: this.rows().map((id) => ({
        name: `replica ${id}`,
        replica: id,
        values: this.bins.first.map((_, bin) => this.lines.get(id).cells[bin] ?? null),
        colors: this.bins.first.map((_, bin) => {
          const value = this.lines.get(id).cells[bin];
          return typeof value === "number" ? heatColor(this.share(value)) : null;
        }),
      })),
    };
  }

  destroy() {
    this.plot.destroy();
  }
}
