/** A comparison of two or more experiments: their curves in one chart, and their numbers relative to the first. */
import { experimentColor, faint } from "./colors.js";
import { Card } from "./charts/card.js";
import { band, Plot } from "./charts/plot.js";
import { middleX, positive, smooth } from "./charts/series.js";
import { csvText } from "./download.js";
import { fill, h } from "./dom.js";
import { duration, number, percent, seconds, short, whole } from "./format.js";
import { isPlanOnly } from "./setup.js";
import { state } from "./state.js";
import { slowestOf } from "./tiles.js";

/** What is compared: [label, value(panel), text, which is better: 1 more, -1 less, 0 neither]. */
const ROWS = [
  ["Replicas", ({ replicas }) => replicas.length, whole, 0],
  ["Steps", ({ summary }) => (summary.steps ? summary.steps[1] - summary.steps[0] + 1 : null), whole, 0],
  ["Time in view", ({ summary }) => summary.seconds, duration, 0],
  ["Loss, last", ({ summary }) => summary.overall["all/loss"]?.last ?? summary.overall["all/loss"]?.mean, number, -1],
  ["Examples per second", ({ summary }) => summary.overall["all/examples_per_second"]?.mean, short, 1],
  ["Step time, mean", ({ summary }) => summary.overall["replica/step_seconds"]?.mean, seconds, -1],
  [
    "Scaling efficiency",
    ({ replicas, summary }) => (replicas.length > 1 ? summary.overall["all/scaling_efficiency"]?.mean : null),
    percent,
    1,
  ],
  ["Waiting for input", ({ summary }) => summary.overall["all/input_share"]?.mean, percent, -1],
  [
    "Slowest replica’s time over the fastest’s",
    ({ summary }) => {
      const slowest = slowestOf(summary);
      return slowest ? 1 / slowest.relative : null;
    },
    (value) => `${number(value, 3)} ×`,
    -1,
  ],
];

export class Comparison {
  constructor(page) {
    this.page = page;
    const about = { id: "comparison", experiment: "", name: "comparison", file: "comparison" };
    this.table = h("table", { class: "comparison" });
    this.numbers = new Card({
      kind: "comparison",
      title: "Compared with the first",
      about,
      csv: () => ({ text: this.csv() }),
    });
    this.numbers.body.append(
      h(
        "div",
        { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Comparison of experiments" },
        this.table,
      ),
    );
    this.overlays = [
      new Overlay(page, "compare-loss", "Loss, mean over replicas", "loss", "mean", number, about),
      new Overlay(page, "compare-throughput", "Examples per second, all replicas", "throughput", "total", short, about),
    ];
    this.element = h(
      "section",
      { class: "panel compare", "aria-label": "Comparison" },
      h("header", { class: "panel-header" }, h("h2", {}, "Comparison")),
      h(
        "div",
        { class: "charts three" },
        this.overlays.map(({ card }) => card.element),
        this.numbers.element,
      ),
    );
  }

  redraw() {
    this.overlays.forEach((overlay) => overlay.redraw());
    this.redrawTable();
  }

  zoom() {
    this.overlays.forEach(({ plot }) => plot.zoom());
  }

  rows() {
    const panels = trainings(this.page);
    if (panels.some(({ summary }) => !summary)) return null;
    return ROWS.map(([label, value, text, better]) => ({
      label,
      text,
      better,
      values: panels.map((panel) => value(panel) ?? null),
    })).filter(({ values }) => values.some((value) => value !== null));
  }

  redrawTable() {
    const panels = trainings(this.page);
    const rows = this.rows();
    if (!rows) return;
    this.numbers.setStatus("");
    fill(
      this.table,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td", {}),
          panels.map((panel) =>
            h(
              "th",
              { scope: "col" },
              h("span", { class: "swatch", style: { background: colorOf(panel) } }),
              panel.title,
            ),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(({ label, text, better, values }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, label),
            values.map((value, i) =>
              h(
                "td",
                {},
                h("span", { class: "value" }, value === null ? "–" : text(value)),
                i && better ? change(value, values[0], better) : null,
              ),
            ),
          ),
        ),
      ),
    );
  }

  csv() {
    return csvText([
      ["", ...trainings(this.page).map(({ title }) => title)],
      ...(this.rows() ?? []).map(({ label, values }) => [label, ...values]),
    ]);
  }

  drawn() {
    return {
      table: this.rows()?.map(({ label, values }) => ({ label, values })),
      charts: this.overlays.map((overlay) => overlay.drawn()),
    };
  }

  destroy() {
    this.overlays.forEach(({ plot }) => plot.destroy());
  }
}

/** "+12 % better", in words and not by colour alone. */
function change(value, base, better) {
  if (typeof value !== "number" || typeof base !== "number" || !base) return null;
  const share = value / base - 1;
  if (Math.abs(share) < 0.005) return h("span", { class: "change" }, "same");
  const good = share * better > 0;
  const size =
    Math.abs(share) >= 2 ? `${number(value / base, 3)} ×` : `${share > 0 ? "+" : "−"}${percent(Math.abs(share), 2)}`;
  return h("span", { class: good ? "change better" : "change worse" }, `${size} ${good ? "better" : "worse"}`);
}

/** One line per experiment. */
class Overlay {
  constructor(page, kind, title, source, line, text, about) {
    Object.assign(this, { page, kind, source, line, text });
    this.card = new Card({
      kind,
      title,
      about,
      png: () => ({
        canvases: [this.plot.u.ctx.canvas],
        legend: trainings(page).map((panel) => ({ color: colorOf(panel), text: panel.title.slice(0, 40) })),
      }),
    });
    this.plot = new Plot({ label: title, height: 260, oncursor: (index, u) => this.read(index, u) });
    this.card.body.append(this.plot.element);
  }

  redraw() {
    const panels = trainings(this.page);
    const held = panels
      .map((panel) => ({ panel, chart: panel.chart(this.source) }))
      .filter(({ chart }) => chart?.bins && (chart.overall[this.line] || chart.lines.size));
    fill(
      this.card.footer,
      h(
        "div",
        { class: "part-legend" },
        panels.map((panel) =>
          h(
            "span",
            { class: "swatch-label" },
            h("span", { class: "swatch", style: { background: colorOf(panel) } }),
            panel.title,
          ),
        ),
      ),
    );
    if (!held.length) return;
    this.card.setStatus("");
    const columns = held.map(({ chart }) => ({
      x: middleX(chart.bins),
      line: chart.overall[this.line] ?? [...chart.lines.values()][0],
      chart,
    }));
    const x = [...new Set(columns.flatMap((column) => column.x))].sort((a, b) => a - b);
    const places = new Map(x.map((position, i) => [position, i]));
    const spread = (column, values) => {
      const all = new Array(x.length).fill(undefined);
      column.x.forEach((position, i) => (all[places.get(position)] = values[i]));
      return state.log ? positive(all) : all;
    };
    const [series, bands] = [[], []];
    columns.forEach((column, k) => {
      const { panel } = held[k];
      const color = colorOf(panel);
      const { min, max } = column.chart.overall;
      if (this.line === "mean" && min && max && column.chart.lines.size > 1) {
        bands.push(band(series.length, series.length + 1, color, 0.14));
        series.push({ name: `${panel.title} highest`, values: spread(column, max.mean), color, hidden: true });
        series.push({ name: `${panel.title} lowest`, values: spread(column, min.mean), color, hidden: true });
      }
      if (state.smoothing)
        series.push({
          name: `${panel.title} unsmoothed`,
          values: spread(column, column.line.mean),
          color: faint(color, 0.25),
          width: 1,
        });
      series.push({
        name: panel.title,
        experiment: panel.name,
        values: spread(column, smooth(column.line.mean, state.smoothing)),
        color,
        width: 2,
        focus: true,
      });
    });
    this.drawing = {
      x,
      series,
      bands,
      y: { text: this.text, log: state.log, zero: this.line === "total" && !state.log },
    };
    this.plot.draw(this.drawing);
  }

  /** The nearest value of each experiment at or before the cursor. */
  read(index, u) {
    if (index === null) return void (this.card.readout.textContent = "");
    const at = u.data[0][index];
    const values = this.drawing.series
      .filter((one) => one.experiment !== undefined)
      .map((one) => {
        let i = index;
        while (i >= 0 && typeof one.values[i] !== "number") i--;
        return `${one.name} ${i < 0 ? "–" : this.text(one.values[i])}`;
      });
    const place = state.axis === "step" ? `step ${whole(at)}` : state.axis === "relative" ? duration(at) : "";
    this.card.readout.textContent = [place, ...values].filter(Boolean).join("  ·  ");
  }

  drawn() {
    if (!this.drawing) return null;
    const { x, series } = this.drawing;
    return {
      kind: this.kind,
      view: this.plot.view(),
      x: [...x],
      series: series.map(({ name, experiment, values }) => ({
        name,
        experiment,
        values: values.map((value) => value ?? null),
      })),
    };
  }
}

/** The panels of a plan alone have nothing to compare. */
const trainings = (page) => page.panels().filter((panel) => !isPlanOnly(panel.experiment));

/** As in the panel's heading. */
const colorOf = (panel) => experimentColor(state.selected.indexOf(panel.name));
