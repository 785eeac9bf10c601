/** The controls of the whole page: experiments, axis, smoothing, log scale, zoom. */
import { experimentColor } from "./colors.js";
import { fill, h, icon, segmented, toggle } from "./dom.js";
import { clock, dateTime, experimentName } from "./format.js";
import { on, set, state, zoomTo } from "./state.js";

const AXES = [
  ["step", "Step", "Optimizer steps"],
  ["relative", "Relative", "Time since the first step of each experiment"],
  ["wall", "Clock", "Time of day"],
];
const KEYS = [
  ["Drag", "zoom all charts to a part of the axis"],
  ["Double click", "show everything again"],
  ["← →", "read the values of a focused chart"],
  ["Page Up, Page Down", "ten points back or forward"],
  ["+ −", "zoom in and out"],
  ["Shift ← →", "move along the axis"],
  ["0", "show everything again"],
  ["Esc", "hide the cursor"],
  ["Click a replica", "hide or show it"],
  ["Shift and click", "show only this replica"],
];

export class Toolbar {
  constructor() {
    this.picker = new Picker();
    this.axis = segmented("Horizontal axis", AXES, state.axis, (axis) => set({ axis }));
    this.smoothing = h("input", {
      type: "range",
      id: "smoothing",
      min: 0,
      max: 0.99,
      step: 0.01,
      value: state.smoothing,
      oninput: () => set({ smoothing: Number(this.smoothing.value) }),
    });
    this.smoothingValue = h("output", { for: "smoothing" });
    this.log = toggle("Log scale", state.log, (log) => set({ log }), {
      title: "Logarithmic scale for loss and throughput",
      "data-control": "log",
    });
    this.link = toggle("Same scales", state.linked, (linked) => set({ linked }), {
      title: "Give the charts of all experiments the same vertical scale",
      "data-control": "linked",
    });
    this.reset = h(
      "button",
      {
        type: "button",
        class: "toggle reset",
        "data-control": "reset",
        title: "Show the whole axis (double click on a chart)",
        onclick: () => zoomTo(null),
      },
      icon("reset"),
      "Reset zoom",
    );
    this.updated = h("span", { class: "updated", role: "status" });
    this.element = h(
      "header",
      { class: "toolbar", role: "toolbar", "aria-label": "Replicas" },
      this.picker.element,
      h(
        "div",
        { class: "control" },
        h("span", { class: "control-label", "aria-hidden": "true" }, "Axis"),
        this.axis.element,
      ),
      h(
        "div",
        { class: "control" },
        h("label", { class: "control-label", for: "smoothing" }, "Smoothing"),
        this.smoothing,
        this.smoothingValue,
      ),
      this.log.element,
      this.link.element,
      this.reset,
      h("span", { class: "spacer" }),
      this.updated,
      new Help().element,
    );
    on(["axis", "smoothing", "log", "zoom", "selected", "linked"], () => this.redraw());
    this.redraw();
  }

  redraw() {
    this.axis.set(state.axis);
    this.smoothing.value = state.smoothing;
    this.smoothingValue.textContent = state.smoothing.toFixed(2);
    this.log.set(state.log);
    this.link.set(state.linked);
    this.link.element.hidden = state.selected.length < 2;
    this.reset.hidden = state.zoom === null;
  }

  setUpdated(text) {
    this.updated.textContent = text ?? `updated ${clock(Date.now() / 1000)}`;
  }
}

/** Something that a button opens and Escape closes. */
class Popover {
  constructor(button, content, label) {
    this.button = button;
    this.content = content;
    content.hidden = true;
    content.setAttribute("role", "dialog");
    content.setAttribute("aria-label", label);
    button.setAttribute("aria-haspopup", "dialog");
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => this.open(content.hidden));
    this.element = h(
      "div",
      {
        class: "popover-anchor",
        onkeydown: (event) =>
          event.key === "Escape" && !content.hidden && (event.stopPropagation(), this.open(false), button.focus()),
        onfocusout: (event) => event.relatedTarget && !this.element.contains(event.relatedTarget) && this.open(false),
      },
      button,
      content,
    );
    document.addEventListener("pointerdown", (event) => !this.element.contains(event.target) && this.open(false));
    // A click into TensorBoard's own page does not reach this frame, but takes the focus from it.
    window.addEventListener("blur", () => this.open(false));
  }

  open(open) {
    if (this.content.hidden === !open) return;
    this.content.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    if (open) this.onopen?.();
  }
}

/** Choose an experiment by its name, or tick several to compare them. */
class Picker extends Popover {
  constructor() {
    const current = h("span", { class: "picker-current" });
    const button = h(
      "button",
      { type: "button", class: "picker", "data-control": "experiments" },
      h("span", { class: "control-label" }, "Experiment"),
      current,
      icon("down"),
    );
    const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter experiments" });
    const list = h("ul", { class: "picker-list" });
    const content = h(
      "div",
      { class: "popover picker-popover" },
      filter,
      list,
      h(
        "p",
        { class: "note" },
        "Click a name to open it. Tick several to compare them side by side: the first one ticked is the baseline.",
      ),
    );
    super(button, content, "Experiments");
    Object.assign(this, { current, filter, list });
    filter.addEventListener("input", () => this.redraw());
    this.onopen = () => (this.filter.hidden ? this.list.querySelector("input") : this.filter)?.focus();
    on(["experiments", "selected"], () => this.redraw());
  }

  redraw() {
    const { experiments, selected } = state;
    fill(
      this.current,
      selected.length > 1
        ? `${selected.length} compared`
        : selected.length
          ? h("span", { class: "experiment-name" }, experimentName(selected[0]))
          : "none",
    );
    this.current.title = selected.map(experimentName).join(", ");
    this.filter.hidden = experiments.length < 8;
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = experiments.filter(({ name }) =>
      words.every((word) => experimentName(name).toLowerCase().includes(word)),
    );
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const key = focused && [focused.dataset.name, focused.tagName];
    fill(
      this.list,
      shown.map((experiment) => this.row(experiment)),
    );
    if (key) [...this.list.querySelectorAll(key[1])].find((element) => element.dataset.name === key[0])?.focus();
  }

  row({ name, replicas, manifest, last_wall: wall }) {
    const place = state.selected.indexOf(name);
    const title = experimentName(name);
    const about = [
      manifest?.strategy?.name,
      `${replicas.length} replica${replicas.length === 1 ? "" : "s"}`,
      typeof wall === "number" ? dateTime(wall) : null,
    ].filter((word) => typeof word === "string");
    return h(
      "li",
      { class: place >= 0 ? "picked" : null },
      h("input", {
        type: "checkbox",
        checked: place >= 0,
        "data-name": name,
        "aria-label": `Compare ${title}`,
        title: "Tick several to compare",
        onchange: () => this.flip(name),
      }),
      h(
        "button",
        {
          type: "button",
          class: "picker-name",
          "data-name": name,
          "aria-current": place >= 0 ? "true" : null,
          onclick: () => this.pick(name),
        },
        h(
          "span",
          { class: "experiment-name" },
          place >= 0 && state.selected.length > 1
            ? h("span", { class: "swatch", style: { background: experimentColor(place) } })
            : null,
          title,
        ),
        h("span", { class: "picker-about" }, about.join("  ·  ")),
      ),
    );
  }

  /** Show one experiment, and nothing else. */
  pick(name) {
    set({ selected: [name] });
    this.open(false);
    this.button.focus();
  }

  flip(name) {
    const { selected } = state;
    const next = selected.includes(name) ? selected.filter((other) => other !== name) : [...selected, name];
    set({ selected: next.length ? next : selected });
    this.redraw();
  }
}

class Help extends Popover {
  constructor() {
    super(
      h("button", { type: "button", class: "icon-button help", "aria-label": "Keys and mouse" }, icon("help")),
      h(
        "div",
        { class: "popover help-popover" },
        h("h3", {}, "Keys and mouse"),
        h(
          "dl",
          {},
          KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]),
        ),
      ),
      "Keys and mouse",
    );
  }
}
