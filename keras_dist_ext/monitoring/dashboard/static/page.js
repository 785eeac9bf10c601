/** The page: the toolbar, a panel for each experiment that is selected, and their comparison. */
import { getExperiments } from "./api.js";
import { Comparison } from "./compare.js";
import { fill, h } from "./dom.js";
import { emptyView } from "./empty.js";
import { Panel } from "./panel.js";
import { isPlanOnly } from "./setup.js";
import { on, set, state } from "./state.js";
import { Toolbar } from "./toolbar.js";

const SETTLE = 120; // ms after the last movement of a zoom until finer data are fetched

export class Page {
  constructor() {
    this.held = new Map();
    this.comparison = null;
    this.busy = 0;
    this.toolbar = new Toolbar();
    this.columns = h("div", { class: "columns" });
    this.notice = h("div", {});
    this.over = h("div", {});
    this.main = h("main", {}, this.notice, this.over, this.columns);
    this.element = h("div", { class: "page" }, this.toolbar.element, this.main);
    on(["selected"], () => this.arrange());
    on(["zoom"], () => this.rezoom());
    on(["extents"], () => this.everyPlot((one) => one.zoom()));
    on(["axis", "smoothing", "log", "throughput", "split", "linked", "hidden"], () => this.redraw());
    on(["heat"], () => this.load());
  }

  panels() {
    return state.selected.map((name) => this.held.get(name)).filter(Boolean);
  }

  comparing() {
    return state.selected.length > 1;
  }

  /** The panels whose charts share their scales with a panel's. */
  linked(panel) {
    return this.comparing() && state.linked ? this.panels() : [panel];
  }

  everyPlot(act) {
    this.panels().forEach(act);
    if (this.comparison) act(this.comparison);
  }

  /** Ask what there is, and load what has changed. */
  async refresh(asked = getExperiments()) {
    await this.during(async () => {
      let listing;
      try {
        listing = await asked;
      } catch (error) {
        this.toolbar.setUpdated("not updated");
        if (!state.experiments.length)
          fill(this.notice, h("p", { class: "hint error" }, `TensorBoard does not answer: ${error.message}`));
        return;
      }
      const { experiments, logdir } = listing;
      this.toolbar.setUpdated();
      this.element.classList.toggle("is-empty", !experiments.length);
      fill(this.notice, experiments.length ? null : emptyView(logdir));
      const names = new Set(experiments.map(({ name }) => name));
      const kept = state.selected.filter((name) => names.has(name));
      const added = experiments.length && !kept.length ? [this.first(experiments)] : [];
      const before = new Set(this.held.keys());
      set({
        experiments,
        selected: added.length || kept.length !== state.selected.length ? [...kept, ...added] : state.selected,
      });
      await Promise.all(
        this.panels()
          .filter(({ name }) => before.has(name))
          .map((panel) => panel.update(experiments.find(({ name }) => name === panel.name))),
      );
    });
  }

  /** The experiment to start with: what the address asks for, else what was written to last, trainings first. */
  first(experiments) {
    const asked = experiments.find(({ name }) => name === this.asked);
    const training = experiments.filter((one) => !/(^|\/)validation$/.test(one.name) && !isPlanOnly(one));
    const newest = (list) => list.reduce((best, one) => (one.last_wall > best.last_wall ? one : best), list[0]);
    return (asked ?? newest(training.length ? training : experiments)).name;
  }

  /** Put the panels of what is selected on the page. */
  arrange() {
    for (const [name, panel] of this.held) {
      if (!state.selected.includes(name)) {
        panel.destroy();
        this.held.delete(name);
      }
    }
    const fresh = [];
    for (const name of state.selected) {
      if (this.held.has(name)) continue;
      const panel = new Panel(
        this,
        state.experiments.find((experiment) => experiment.name === name),
      );
      this.held.set(name, panel);
      fresh.push(panel);
    }
    if (this.comparing() !== (this.comparison !== null)) {
      this.comparison?.destroy();
      this.comparison = this.comparing() ? new Comparison(this) : null;
    }
    this.columns.classList.toggle("side-by-side", this.comparing());
    fill(this.over, this.comparison?.element);
    fill(
      this.columns,
      this.panels().map(({ element }) => element),
    );
    for (const panel of this.panels()) if (!fresh.includes(panel)) panel.redraw();
    this.during(() => Promise.all((fresh.length ? fresh : []).map((panel) => panel.load())));
    this.comparison?.redraw();
  }

  /** The part of the axis in view has changed: show it at once with what there is, then fetch finer data. */
  rezoom() {
    this.everyPlot((one) => one.zoom());
    clearTimeout(this.settling);
    if (!this.settling) this.busy += 1;
    this.settling = setTimeout(() => {
      this.settling = null;
      this.busy -= 1;
      this.load();
    }, SETTLE);
  }

  load() {
    return this.during(() => Promise.all(this.panels().map((panel) => panel.load())));
  }

  redraw() {
    this.everyPlot((one) => one.redraw());
  }

  /** A chart of a panel has new data: others may share its scale, or show it too. */
  changed(panel, kind) {
    for (const other of this.linked(panel)) if (other !== panel) other.chart(kind)?.redraw();
    if (this.linked(panel).length > 1) panel.chart(kind)?.redraw();
    this.comparison?.redraw();
  }

  async during(work) {
    this.busy += 1;
    try {
      await work();
    } finally {
      this.busy -= 1;
    }
  }
}
