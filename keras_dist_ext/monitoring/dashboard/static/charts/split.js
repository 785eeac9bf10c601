/** Where a step's time goes: for each replica a bar of compute, waiting for input, and sync on top of each other. */
import { cssColor, partColor } from "../colors.js";
import { h, segmented } from "../dom.js";
import { csvText } from "../download.js";
import { percent, seconds, ticks } from "../format.js";
import { hiddenOf, set, state } from "../state.js";
import { Card } from "./card.js";
import { hideTooltip, showTooltip } from "./tooltip.js";

const PARTS = [
  ["compute", "replica/compute_seconds", "compute"],
  ["input", "replica/input_seconds", "waiting for input"],
  ["sync", "replica/sync_seconds", "sync and update"],
];
const HEIGHT = 260;
const PAD = { left: 58, right: 14, top: 12, bottom: 34 };

export class SplitChart {
  constructor(panel) {
    this.panel = panel;
    this.kind = "split";
    this.modes = segmented(
      "Show parts of a step as",
      [
        ["seconds", "Seconds", "Mean seconds of a step"],
        ["share", "Share", "Share of the three"],
      ],
      state.split,
      (mode) => set({ split: mode }),
    );
    this.canvas = h("canvas", {});
    this.over = h("div", { class: "split-over" });
    this.box = h(
      "div",
      {
        class: "plot split",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "chart",
        onpointermove: (event) => this.point(event),
        onpointerleave: () => this.unpoint(),
        onblur: () => this.unpoint(),
        onkeydown: (event) => this.key(event),
      },
      this.canvas,
      this.over,
    );
    this.box.style.height = `${HEIGHT}px`;
    this.legendRow = h("div", { class: "part-legend" });
    this.card = new Card({
      kind: "split",
      title: "Where a step’s time goes",
      about: panel.about,
      controls: [this.modes.element],
      csv: () => ({ text: this.csv() }),
      png: () => ({
        canvases: [this.canvas],
        legend: PARTS.map(([part, , text]) => ({ color: partColor(part), text })),
        caption: panel.axisCaption(),
      }),
    });
    this.card.body.append(this.box);
    this.card.footer.append(this.legendRow);
    this.resizer = new ResizeObserver(() => this.redraw());
    this.resizer.observe(this.box);
    this.at = null;
  }

  get element() {
    return this.card.element;
  }

  show(summary) {
    this.summary = summary;
    this.redraw();
  }

  bars() {
    const hidden = hiddenOf(this.panel.name);
    return this.summary.replicas
      .map(({ id, numbers }) => ({
        id,
        parts: Object.fromEntries(
          PARTS.filter(([, tag]) => typeof numbers[tag]?.mean === "number").map(([part, tag]) => [
            part,
            numbers[tag].mean,
          ]),
        ),
      }))
      .filter(({ id, parts }) => !hidden.has(id) && Object.keys(parts).length)
      .map(({ id, parts }) => ({ id, parts, total: Object.values(parts).reduce((sum, value) => sum + value, 0) }));
  }

  extent() {
    if (!this.summary) return null;
    return [0, Math.max(0, ...this.bars().map(({ total }) => total))];
  }

  redraw() {
    if (!this.summary) return;
    this.modes.set(state.split);
    const bars = this.bars();
    if (!bars.length) return this.card.setStatus("empty", "No compute, input or sync times in this log.");
    this.card.setStatus("");
    const parts = PARTS.filter(([part]) => bars.some((bar) => part in bar.parts));
    this.legendRow.replaceChildren(
      ...parts.map(([part, , text]) =>
        h(
          "span",
          { class: "swatch-label" },
          h("span", { class: "swatch", style: { background: partColor(part) } }),
          text,
        ),
      ),
    );
    this.box.setAttribute(
      "aria-label",
      `Compute, input and sync time of ${bars.length} replicas. Left and right arrow read values.`,
    );
    const width = this.box.clientWidth;
    if (width) this.paint(bars, parts, width);
  }

  paint(bars, parts, width) {
    const unit = devicePixelRatio;
    Object.assign(this.canvas, { width: Math.round(width * unit), height: Math.round(HEIGHT * unit) });
    const ctx = this.canvas.getContext("2d");
    ctx.scale(unit, unit);
    ctx.font = '11px Roboto, "Segoe UI", system-ui, sans-serif';
    const share = state.split === "share";
    const top = share ? 1 : (this.panel.union(this) ?? this.extent())[1] || 1;
    const inner = { width: width - PAD.left - PAD.right, height: HEIGHT - PAD.top - PAD.bottom };
    const y = (value) => PAD.top + inner.height * (1 - value / (top * (share ? 1 : 1.05)));
    paintAxis(ctx, y, top, share, width);
    const slot = inner.width / bars.length;
    const bar = Math.max(2, Math.min(56, slot - Math.max(1.5, Math.min(14, slot * 0.22))));
    const every = Math.ceil(26 / slot);
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    this.places = bars.map((one, i) => {
      const x = PAD.left + slot * (i + 0.5);
      let from = 0;
      const drawn = [];
      for (const [part] of parts) {
        const value = (one.parts[part] ?? 0) / (share ? one.total || 1 : 1);
        ctx.fillStyle = partColor(part);
        const [low, high] = [y(from), y(from + value)];
        ctx.fillRect(x - bar / 2, high, bar, Math.max(0, low - high - (low - high > 3 && bar > 5 ? 1 : 0)));
        drawn.push({ part, value, height: low - high });
        from += value;
      }
      if (i % every === 0) {
        ctx.fillStyle = cssColor("--ink-soft");
        ctx.fillText(String(one.id), x, HEIGHT - PAD.bottom + 7);
      }
      return { ...one, x, left: PAD.left + slot * i, slot, drawn };
    });
    ctx.fillStyle = cssColor("--ink-soft");
    ctx.fillText("replica", PAD.left + inner.width / 2, HEIGHT - 12);
  }

  csv() {
    const rows = this.bars().map(({ id, parts }) => [id, ...PARTS.map(([part]) => parts[part])]);
    return csvText([["replica", ...PARTS.map(([part]) => `${part}_seconds`)], ...rows]);
  }

  point(event) {
    const x = event.clientX - this.box.getBoundingClientRect().left;
    const index = this.places?.findIndex(({ left, slot }) => x >= left && x < left + slot) ?? -1;
    this.mark(index < 0 ? null : index, event.clientY);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.unpoint();
    if (!by || !this.places?.length) return;
    event.preventDefault();
    const next = this.at === null ? (by > 0 ? 0 : this.places.length - 1) : this.at + by;
    this.mark(Math.min(this.places.length - 1, Math.max(0, next)));
  }

  mark(index, clientY) {
    if (index === null) return this.unpoint();
    this.at = index;
    const { id, parts, total, left, slot, x } = this.places[index];
    Object.assign(this.over.style, { display: "block", left: `${left}px`, width: `${slot}px` });
    const rows = PARTS.filter(([part]) => part in parts).map(([part, , text]) => ({
      color: partColor(part),
      name: text,
      value: `${seconds(parts[part])}  ·  ${percent(parts[part] / (total || 1))}`,
    }));
    this.card.readout.textContent = [
      `replica ${id}`,
      ...rows.map(({ name, value }) => `${name} ${value.split("  ·  ")[0]}`),
    ].join("  ·  ");
    const box = this.box.getBoundingClientRect();
    const cursor = { left: x, top: clientY === undefined ? HEIGHT / 3 : clientY - box.top };
    showTooltip({ over: this.box, cursor }, `replica ${id}  ·  ${this.panel.deviceOf(id)}`, [
      ...rows,
      { name: "together", value: seconds(total) },
    ]);
    this.panel.highlight(id, this);
  }

  unpoint() {
    if (this.at === null) return;
    this.at = null;
    this.over.style.display = "none";
    this.card.readout.textContent = "";
    hideTooltip();
    this.panel.highlight(null, this);
  }

  highlight() {}

  zoom() {}

  /** What is drawn, for tests and the console: a value a part, heights in CSS pixels. */
  drawn() {
    if (!this.places) return null;
    return {
      kind: this.kind,
      mode: state.split,
      bars: this.places.map(({ id, parts, drawn }) => ({
        replica: id,
        parts,
        heights: Object.fromEntries(drawn.map(({ part, height }) => [part, height])),
      })),
    };
  }

  destroy() {
    this.resizer.disconnect();
  }
}

function paintAxis(ctx, y, top, share, width) {
  const step = share ? 0.25 : niceStep(top / 4);
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const values = Array.from({ length: Math.floor((top * 1.001) / step) + 1 }, (_, i) => i * step);
  const labels = ticks(values, share ? percent : seconds);
  values.forEach((value, i) => {
    const at = Math.round(y(value)) + 0.5;
    ctx.strokeStyle = cssColor("--grid");
    ctx.beginPath();
    ctx.moveTo(PAD.left, at);
    ctx.lineTo(width - PAD.right, at);
    ctx.stroke();
    ctx.fillStyle = cssColor("--ink-soft");
    ctx.fillText(labels[i], PAD.left - 8, at);
  });
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
}
