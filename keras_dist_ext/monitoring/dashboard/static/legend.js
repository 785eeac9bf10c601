/** Buttons that choose the visible replicas. Click hides or shows; Shift and click, or double click, shows only one. */
import { fill, h, setProps } from "./dom.js";
import { hiddenOf, setHidden } from "./state.js";

export class Legend {
  constructor(panel) {
    this.panel = panel;
    this.buttons = new Map();
    this.count = h("span", { class: "legend-count" });
    this.chips = h("div", { class: "chips", onkeydown: (event) => this.key(event) });
    this.element = h(
      "div",
      { class: "legend", role: "group", "aria-label": `Replicas of ${panel.title}` },
      this.count,
      this.chips,
      h(
        "div",
        { class: "legend-all" },
        h("button", { type: "button", class: "link", onclick: () => setHidden(panel.name, []) }, "all"),
        h("button", { type: "button", class: "link", onclick: () => setHidden(panel.name, panel.replicas) }, "none"),
        h("button", { type: "button", class: "link", onclick: () => this.invert() }, "invert"),
      ),
    );
  }

  redraw() {
    const { panel } = this;
    const focused = document.activeElement?.dataset?.replica;
    const within = this.chips.contains(document.activeElement);
    if (String([...this.buttons.keys()]) !== String(panel.replicas)) {
      this.buttons = new Map(panel.replicas.map((id, i) => [id, this.chip(id, i)]));
      fill(this.chips, [...this.buttons.values()]);
    }
    const hidden = hiddenOf(panel.name);
    for (const [id, button] of this.buttons) {
      setProps(button, { "aria-pressed": String(!hidden.has(id)) });
      button.firstChild.style.background = panel.color(id);
    }
    const shown = panel.replicas.filter((id) => !hidden.has(id)).length;
    this.count.textContent =
      shown === panel.replicas.length ? "Replicas" : `Replicas (${shown} of ${panel.replicas.length})`;
    if (within && focused !== undefined) this.buttons.get(Number(focused))?.focus();
  }

  chip(id, index) {
    const device = this.panel.deviceOf(id);
    return h(
      "button",
      {
        type: "button",
        class: "chip",
        "data-replica": id,
        tabindex: index ? -1 : 0,
        "aria-label": `replica ${id}`,
        title: `replica ${id}${device ? ` on ${device}` : ""}: click hides or shows it, Shift and click shows only this one`,
        onclick: (event) => (event.shiftKey ? this.alone(id) : this.flip(id)),
        ondblclick: () => this.alone(id),
        onpointerenter: () => this.panel.highlight(id),
        onpointerleave: () => this.panel.highlight(null),
        onfocus: () => this.panel.highlight(id),
        onblur: () => this.panel.highlight(null),
      },
      h("span", { class: "swatch" }),
      String(id),
    );
  }

  flip(id) {
    const hidden = new Set(hiddenOf(this.panel.name));
    if (!hidden.delete(id)) hidden.add(id);
    setHidden(this.panel.name, hidden);
  }

  alone(id) {
    setHidden(
      this.panel.name,
      this.panel.replicas.filter((other) => other !== id),
    );
  }

  invert() {
    const hidden = hiddenOf(this.panel.name);
    setHidden(
      this.panel.name,
      this.panel.replicas.filter((id) => !hidden.has(id)),
    );
  }

  /** One stop of the Tab key; arrows move inside, Space and Enter click. */
  key(event) {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const chips = [...this.buttons.values()];
    const next = chips[(chips.indexOf(document.activeElement) + by + chips.length) % chips.length];
    chips.forEach((chip) => (chip.tabIndex = chip === next ? 0 : -1));
    next.focus();
  }
}
