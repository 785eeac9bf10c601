/** One experiment on the page: its setup, findings, charts and table, and their data. */
import { getSeries, getSummary, getTrained } from "./api.js";
import { cssColor, experimentColor, replicaColor } from "./colors.js";
import { Heatmap } from "./charts/heatmap.js";
import { LinesChart } from "./charts/lines.js";
import { SplitChart } from "./charts/split.js";
import { fill, h } from "./dom.js";
import { fileName } from "./download.js";
import { clock, dateTime, device, duration, experimentName, whole } from "./format.js";
import { Legend } from "./legend.js";
import { PlanCard } from "./plan.js";
import { findingsView, isPlanOnly, setupView } from "./setup.js";
import { set, state, zoomTo } from "./state.js";
import { ReplicaTable } from "./table.js";
import { tilesView } from "./tiles.js";

let lastId = 0;

export class Panel {
  /** `page` has all panels, and is notified when one has new data. */
  constructor(page, experiment) {
    this.page = page;
    this.name = experiment.name;
    this.title = experimentName(experiment.name);
    this.about = {
      id: `experiment-${++lastId}`,
      experiment: experiment.name,
      name: this.title,
      file: fileName(this.title),
    };
    this.extents = new Map();
    this.start = null;
    this.summary = null;
    this.describe(experiment);
    this.swatch = h("span", { class: "swatch" });
    this.setup = h("div", {});
    this.tiles = h("div", { class: "tiles" });
    this.findings = h("div", {});
    this.hints = h("div", { class: "hints" });
    this.legend = new Legend(this);
    this.grid = h("div", { class: "charts" });
    this.element = h(
      "section",
      { class: "panel", "data-experiment": this.name, "aria-label": `Experiment ${this.title}` },
      h(
        "header",
        { class: "panel-header" },
        h("h2", {}, this.swatch, h("span", { class: "experiment-name" }, this.title)),
        this.setup,
      ),
      this.tiles,
      this.findings,
      this.hints,
      this.legend.element,
      this.grid,
    );
    this.buildCharts();
    this.redrawFrame();
  }

  describe(experiment) {
    this.experiment = experiment;
    this.replicas = experiment.replicas;
    this.places = new Map(experiment.replicas.map((id, i) => [id, i]));
    this.tags = new Set(experiment.tags);
  }

  buildCharts() {
    this.charts?.forEach((chart) => chart.destroy());
    this.series = [
      new LinesChart(this, "loss", "replica/loss"),
      new LinesChart(this, "throughput", "replica/examples_per_second"),
      new Heatmap(this),
      ...(this.tags.has("replica/gradient_norm")
        ? [new LinesChart(this, "gradient_norm", "replica/gradient_norm")]
        : []),
    ];
    this.summaries = [new SplitChart(this), new ReplicaTable(this)];
    if (isPlanOnly(this.experiment)) this.series = this.summaries = [];
    this.plan = this.experiment.plan ? new PlanCard(this) : null;
    this.charts = [...this.series, ...this.summaries, ...(this.plan ? [this.plan] : [])];
    const order = ["loss", "throughput", "heatmap", "split", "gradient_norm", "table", "plan"];
    const sorted = [...this.charts].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
    fill(
      this.grid,
      sorted.map((chart) => chart.element),
    );
    this.builtFor = this.kindsOfData();
  }

  /** What decides which charts there are. */
  kindsOfData() {
    return String([...this.tags, Boolean(this.experiment.plan), isPlanOnly(this.experiment)]);
  }

  chart(kind) {
    return this.charts.find((chart) => chart.kind === kind);
  }

  /** Update from the server's list of experiments, and load new data. */
  update(experiment) {
    const isNew = experiment.version !== this.experiment.version;
    this.describe(experiment);
    if (this.builtFor !== this.kindsOfData()) this.buildCharts();
    if (isNew) {
      this.redrawFrame();
      return this.load();
    }
    return Promise.resolve();
  }

  redrawFrame() {
    this.swatch.style.background = experimentColor(Math.max(0, state.selected.indexOf(this.name)));
    this.swatch.hidden = !this.page.comparing();
    fill(this.setup, setupView(this.experiment));
    fill(
      this.findings,
      findingsView(this.experiment, (step) => this.lookAt(step)),
    );
    this.legend.redraw();
    this.legend.element.hidden = isPlanOnly(this.experiment);
    if (this.summary) fill(this.tiles, tilesView(this));
  }

  redraw() {
    this.redrawFrame();
    this.refreshExtents();
    for (const chart of this.charts) chart.redraw();
  }

  zoom() {
    for (const chart of this.series) chart.zoom();
  }

  /** Fetch the visible part, at the resolution of the charts. */
  async load() {
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    const range = this.range();
    const zoomed = state.zoom !== null;
    const fetchSeries = async (chart) => {
      const response = await getSeries(this.name, chart.tag, range, this.width(), controller.signal);
      if (controller.signal.aborted) return;
      response.everything = response.exact && !zoomed;
      this.start = response.start ?? this.start;
      if (response.extent) this.extents.set(chart.kind, response.extent);
      this.refreshExtents();
      chart.version = this.experiment.version;
      chart.show(response);
      this.showHints();
      this.page.changed(this, chart.kind);
    };
    const fetchSummary = async () => {
      const summary = await getSummary(this.name, range, controller.signal);
      if (controller.signal.aborted) return;
      this.summary = summary;
      fill(this.tiles, tilesView(this));
      for (const chart of this.summaries) chart.show(summary);
      this.chart("heatmap").advise();
      this.page.changed(this, "split");
    };
    const fetchTrained = async () => {
      const trained = await getTrained(controller.signal);
      if (!controller.signal.aborted) this.plan.show(this.experiment.plan, trained);
    };
    const wanted = this.series.filter(
      (chart) =>
        !(chart.response?.everything && chart.response.tag === chart.tag && chart.version === this.experiment.version),
    );
    await Promise.all([
      ...wanted.map((chart) => this.guarded(fetchSeries(chart), [chart], controller)),
      ...(this.summaries.length ? [this.guarded(fetchSummary(), this.summaries, controller)] : []),
      ...(this.plan ? [this.guarded(fetchTrained(), [this.plan], controller)] : []),
    ]);
  }

  async guarded(work, charts, controller) {
    try {
      await work;
    } catch (error) {
      if (controller.signal.aborted) return;
      for (const chart of charts) chart.card.setStatus("error", `Could not be loaded: ${error.message}`);
    }
  }

  /** The query for the visible part. */
  range() {
    const axis = state.axis === "step" ? "step" : "wall";
    if (!state.zoom) return { axis };
    const offset = state.axis === "relative" ? (this.start ?? 0) : 0;
    return { axis, low: state.zoom.low + offset, high: state.zoom.high + offset };
  }

  width() {
    const pixels = (this.grid.clientWidth || 1200) / (this.page.comparing() ? 1 : 2) - 90;
    return Math.round(Math.min(1600, Math.max(160, this.replicas.length > 16 ? pixels * 0.7 : pixels)));
  }

  refreshExtents() {
    const extents = [...this.extents.values()].map((extent) =>
      state.axis === "step"
        ? extent.step
        : state.axis === "wall"
          ? extent.wall
          : extent.wall.map((wall) => wall - this.start),
    );
    if (!extents.length) return;
    const extent = [Math.min(...extents.map(([low]) => low)), Math.max(...extents.map(([, high]) => high))];
    const held = state.extents.get(this.name);
    if (!held || held[0] !== extent[0] || held[1] !== extent[1])
      set({ extents: new Map(state.extents).set(this.name, extent) });
  }

  /** The same part of the run on another axis, estimated from the points that are drawn. */
  convert(zoom, from, to) {
    const response = this.series.map((chart) => chart.response).find((one) => one?.steps.length > 1);
    if (!response) return null;
    const on = (axis) =>
      axis === "step"
        ? response.steps
        : axis === "wall"
          ? response.walls
          : response.walls.map((wall) => wall - this.start);
    const [source, target] = [on(from), on(to)];
    const [low, high] = [zoom.low, zoom.high].map((position) => interpolate(source, target, position));
    return low < high ? { low, high } : null;
  }

  color(id) {
    return replicaColor(this.places.get(id) ?? 0, this.replicas.length);
  }

  fullDeviceOf(id) {
    const devices = this.experiment.manifest?.devices;
    return Array.isArray(devices) && devices[id] !== undefined ? String(devices[id]) : "";
  }

  deviceOf(id) {
    return device(this.fullDeviceOf(id));
  }

  /** "step 1,240 · 14:03:22" */
  binTitle(response, bin) {
    const last = response.ends?.[bin] ?? response.steps[bin];
    const steps =
      last > response.steps[bin]
        ? `steps ${whole(response.steps[bin])}–${whole(last)}`
        : `step ${whole(response.steps[bin])}`;
    const wall = response.walls[bin];
    const time = { step: clock, wall: dateTime, relative: () => duration(wall - response.start) }[state.axis](wall);
    return `${steps}  ·  ${time}`;
  }

  axisCaption() {
    const steps = this.summary?.steps;
    return steps ? `steps ${whole(steps[0])} to ${whole(steps[1])}` : "";
  }

  /** The positions of findings on the axis. */
  findingMarks() {
    const response = this.chart("loss")?.response;
    const marks = [];
    for (const { step, kind } of this.experiment.findings) {
      if (typeof step !== "number") continue;
      const position =
        state.axis === "step"
          ? step
          : response?.steps.length
            ? interpolate(response.steps, response.walls, step) - (state.axis === "relative" ? this.start : 0)
            : null;
      if (position !== null) marks.push({ position, color: cssColor(kind === "divergence" ? "--bad" : "--warn") });
    }
    return marks;
  }

  lookAt(step) {
    const [low, high] = this.extents.get("loss")?.step ?? [0, step];
    const margin = Math.max(2, (high - low) * 0.05);
    if (state.axis !== "step") set({ axis: "step", zoom: null });
    zoomTo(step - margin, step + margin);
    this.grid.scrollIntoView({ block: "start", behavior: "smooth" });
  }

  /** The range that the same chart of other experiments needs on a shared scale; null where each has its own. */
  union(chart) {
    const extents = this.page
      .linked(this)
      .map((panel) => panel.chart(chart.kind))
      .filter((one) => one && (one === chart || one.mode === chart.mode))
      .map((one) => one.extent())
      .filter(Boolean);
    if (extents.length < 2) return null;
    return extents[0].map((_, i) => (i ? Math.max : Math.min)(...extents.map((extent) => extent[i])));
  }

  highlight(id, source = null) {
    for (const chart of this.charts) if (chart !== source) chart.highlight(id);
  }

  showHints() {
    const sampled = this.series.map((chart) => chart.response?.sampled).filter(Boolean);
    if (!sampled.length) return fill(this.hints);
    const { limit } = sampled[0];
    const suggested = Math.max(...sampled.map((one) => one.suggested));
    return fill(
      this.hints,
      h(
        "p",
        { class: "hint sampled", role: "note" },
        `TensorBoard keeps ${whole(limit)} points per series, and has dropped others of this run. `,
        "To see every step, start it with ",
        h("code", {}, `--samples_per_plugin scalars=${suggested}`),
        ".",
      ),
    );
  }

  destroy() {
    this.controller?.abort();
    this.charts.forEach((chart) => chart.destroy());
    const extents = new Map(state.extents);
    extents.delete(this.name);
    set({ extents });
  }
}

function interpolate(source, target, position) {
  if (position <= source[0]) return target[0];
  for (let i = 1; i < source.length; i++) {
    if (position <= source[i]) {
      const share = source[i] === source[i - 1] ? 0 : (position - source[i - 1]) / (source[i] - source[i - 1]);
      return target[i - 1] + share * (target[i] - target[i - 1]);
    }
  }
  return target.at(-1);
}
