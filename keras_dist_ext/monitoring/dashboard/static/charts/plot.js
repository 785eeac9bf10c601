/**
 * A plot on the axis that all charts share: uPlot, with the page's zoom, cursor, keys and colours.
 *
 *   const plot = new Plot({label: "Loss ...", height: 260, oncursor});
 *   plot.draw({x, series, bands, y, paint});   // new data, or another look
 *   plot.zoom();                               // the same data, another part of the axis
 *
 * A series is {name, values, color, width?, fill?, hidden?, focus?}. `y` is {text, log?, zero?, range?, splits?,
 * size?, union?}; `union()` is what other plots need of the same scale. `paint(u)` draws between axes and lines.
 */
import uPlot from "../vendor/uplot/uPlot.esm.js";
import { announce, h } from "../dom.js";
import { cssColor, faint } from "../colors.js";
import { duration, ticks } from "../format.js";
import { state, xRange, zoomTo } from "../state.js";

export const KEYS_HELP = "Left and right arrow read values, plus and minus zoom, 0 shows everything.";
const plots = new Set();
const FONT = '11px Roboto, "Segoe UI", system-ui, sans-serif';

export class Plot {
  constructor({ label, height, oncursor, onfocus = () => {} }) {
    this.height = height;
    this.oncursor = oncursor;
    this.onfocus = onfocus;
    this.u = null;
    this.hovered = false;
    this.keyboard = false;
    this.element = h("div", {
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": label,
      onkeydown: (event) => this.key(event),
      onblur: () => this.keyboard && this.leave(),
    });
    this.element.style.height = `${height}px`;
    this.resizer = new ResizeObserver(() => this.resize());
    this.resizer.observe(this.element);
    plots.add(this);
  }

  get width() {
    return this.element.clientWidth;
  }

  destroy() {
    this.resizer.disconnect();
    this.u?.destroy();
    plots.delete(this);
  }

  resize() {
    if (!this.width) return; // another tab is in front
    if (this.u) this.u.setSize({ width: this.width, height: this.height });
    else if (this.drawing) this.draw(this.drawing);
  }

  setHeight(height) {
    this.height = height;
    this.element.style.height = `${height}px`;
  }

  draw(drawing) {
    this.drawing = drawing;
    if (!this.width) return;
    const at = this.u?.cursor;
    const cursor = at && at.left >= 0 ? { left: at.left, top: at.top } : null;
    this.u?.destroy();
    this.u = new uPlot(this.options(drawing), [drawing.x, ...drawing.series.map((one) => one.values)], this.element);
    if (cursor) this.u.setCursor(cursor, true, false);
  }

  zoom() {
    if (!this.u) return;
    const [min, max] = xRange();
    this.u.setScale("x", { min, max });
  }

  /** From where to where the axes go, and whether the vertical one is logarithmic, for tests and the console. */
  view() {
    const { x, y } = this.u?.scales ?? {};
    return x && { x: [x.min, x.max], y: [y.min, y.max], log: y.distr === 3 };
  }

  options({ series, bands = [], y, paint }) {
    const [ink, grid] = [cssColor("--ink-soft"), cssColor("--grid")];
    const axis = {
      stroke: ink,
      font: FONT,
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1, size: 4 },
    };
    return {
      width: this.width,
      height: this.height,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => xRange() },
        y: { distr: y.log ? 3 : 1, dir: y.dir ?? 1, range: (u, low, high) => yRange(y, low, high) },
      },
      axes: [
        { ...axis, ...xAxis(state.axis), size: 30, ...(y.splits ? { grid: { show: false } } : {}) },
        {
          ...axis,
          gap: 6,
          size: (u, values) => y.size ?? Math.max(44, 18 + 6.4 * Math.max(0, ...(values ?? []).map((v) => v.length))),
          values: (u, splits) => ticks(splits, y.text),
          ...(y.log ? { splits: logSplits } : {}),
          ...(y.splits ? { splits: y.splits, grid: { show: false } } : {}),
        },
      ],
      series: [{}, ...series.map((one) => seriesOptions(one, series.length))],
      bands,
      focus: { alpha: 0.25 },
      cursor: {
        x: true,
        y: false,
        points: { show: (u, i) => this.cursorPoint(series[i - 1], u, i) },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        bind: {
          dblclick: () => () => {
            zoomTo(null);
            return null;
          },
        },
        focus: {
          prox: 24,
          dist: (u, i, at, valuePosition, cursorPosition) =>
            this.hovered && series[i - 1].focus ? valuePosition - cursorPosition : Infinity,
        },
      },
      hooks: {
        drawAxes: paint ? [(u) => paint(u)] : [],
        setCursor: [(u) => this.moved(u)],
        setSeries: [(u, i, changes) => changes.focus !== undefined && this.onfocus(i === null ? null : series[i - 1])],
        setSelect: [(u) => this.selected(u)],
        ready: [
          (u) => {
            u.over.addEventListener("mouseenter", () => (this.hovered = true));
            u.over.addEventListener("mouseleave", () => this.leave());
          },
        ],
      },
    };
  }

  cursorPoint(one, u, i) {
    if (!one?.focus || u.series.length > 24) return false;
    const point = document.createElement("div");
    point.style.background = one.color;
    return point;
  }

  /** The cursor of this plot has moved: read values here, and move the line of the other plots to the same place. */
  moved(u) {
    const index = u.cursor.left >= 0 ? u.cursor.idx : null;
    this.oncursor(index === undefined ? null : index, u);
    if (!this.hovered && !this.keyboard) return;
    const position = index === null ? null : u.posToVal(u.cursor.left, "x");
    for (const plot of plots) if (plot !== this) plot.follow(position);
  }

  follow(position) {
    if (!this.u) return;
    this.hovered = this.keyboard = false;
    const left = position === null ? -10 : this.u.valToPos(position, "x");
    const outside = left < 0 || left > this.u.over.clientWidth;
    this.u.setCursor({ left: outside ? -10 : left, top: -10 }, true, false);
  }

  leave() {
    for (const plot of plots) plot.follow(null);
  }

  /** Show the cursor at a place of the axis, in all plots. */
  point(position) {
    this.keyboard = true;
    this.u?.setCursor({ left: this.u.valToPos(position, "x"), top: this.u.over.clientHeight / 2 }, true, false);
  }

  selected(u) {
    const { left, width } = u.select;
    if (!width) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width >= 4) zoomTo(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  }

  focusSeries(index) {
    this.u?.setSeries(index === null ? null : index + 1, { focus: true });
  }

  key(event) {
    if (!this.u || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = xRange();
    const data = this.u.data[0];
    const at = this.u.cursor.left >= 0 ? this.u.cursor.idx : null;
    const center = at === null ? (low + high) / 2 : data[at];
    const pan = (share) => zoomTo(low + share * (high - low), high + share * (high - low));
    const scale = (factor) => zoomTo(center - (center - low) * factor, center + (high - center) * factor);
    const keys = {
      ArrowLeft: () => (event.shiftKey ? pan(-0.25) : this.step(at, -1)),
      ArrowRight: () => (event.shiftKey ? pan(0.25) : this.step(at, 1)),
      PageUp: () => this.step(at, -10),
      PageDown: () => this.step(at, 10),
      Home: () => this.step(null, 1),
      End: () => this.step(null, -1),
      "+": () => scale(0.5),
      "=": () => scale(0.5),
      "-": () => scale(2),
      0: () => zoomTo(null),
      Escape: () => this.leave(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  /** Read the next point that is in view, and say it. */
  step(at, by) {
    const [low, high] = xRange();
    const data = this.u.data[0];
    let first = data.findIndex((position) => position >= low);
    let last = data.findLastIndex((position) => position <= high);
    if (first < 0 || last < first) return;
    const next = at === null ? (by > 0 ? first : last) : Math.min(last, Math.max(first, at + by));
    this.point(data[next]);
    announce(this.element.closest(".card")?.querySelector(".readout")?.textContent ?? "");
  }
}

function seriesOptions(one, count) {
  return {
    label: one.name,
    scale: "y",
    // A hidden series still has a path: a band needs the two of its edges.
    stroke: one.hidden ? "transparent" : one.color,
    width: one.width ?? 1.5,
    fill: one.fill,
    alpha: one.alpha ?? 1,
    points: { show: false, filter: one.hidden ? null : () => alone(one.values), size: count > 24 ? 4 : 6, fill: one.color },
  };
}

/** Where a line has no length, so that it needs a point: numbers with gaps, or nothing, on both sides. */
function alone(values) {
  const found = [];
  let stretch = []; // the first numbers since the last gap
  const end = () => {
    if (stretch.length === 1) found.push(stretch[0]);
    stretch = [];
  };
  values.forEach((value, i) => {
    if (value === null) end();
    else if (typeof value === "number" && stretch.length < 2) stretch.push(i);
  });
  end();
  return found.length ? found : null;
}

function yRange(y, low, high) {
  if (y.range) return y.range(low, high);
  const union = y.union?.();
  if (union) [low, high] = low === null ? union : [Math.min(low, union[0]), Math.max(high, union[1])];
  if (low === null || high === null) return y.log ? [0.1, 1] : [0, 1];
  if (y.log) {
    const [from, to] = [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))];
    // Whole decades waste half of the plot when the data fill a part of one.
    return high / low > 10
      ? [Math.max(from, low / 1.6), Math.min(to === from ? to * 10 : to, high * 1.6)]
      : [low / 1.3, high * 1.3];
  }
  if (y.zero) return [Math.min(0, low), high > 0 ? high * 1.06 : 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - margin, high + margin];
}

/** Places of a log axis: 1, 2 and 5 of each decade, only decades where there are many, and round numbers within one. */
function logSplits(u, i, low, high) {
  const decades = Math.log10(high / low);
  const digits = decades > 4 ? [1] : [1, 2, 5];
  const splits = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of digits) splits.push(Number(`${digit}e${power}`));
  }
  const inside = splits.filter((value) => value >= low && value <= high);
  if (inside.length > 2) return inside;
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((digit) => digit * unit >= rough);
  return Array.from({ length: 6 }, (_, k) => Number(((Math.ceil(low / step) + k) * step).toPrecision(10))).filter(
    (value) => value <= high,
  );
}

const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const TIMES = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000,
];

function xAxis(axis) {
  if (axis === "step") return { space: 64, incrs: WHOLE, values: (u, splits) => ticks(splits) };
  if (axis === "relative") return { space: 72, incrs: TIMES, values: (u, splits) => splits.map(duration) };
  return {
    space: 84,
    incrs: TIMES,
    splits: localSplits,
    values: (u, splits, i, space, step) => timeLabels(splits, step),
  };
}

/** Splits at whole hours and days of the local time. */
function localSplits(u, i, low, high, step) {
  const offset = step >= 3600 ? new Date(low * 1000).getTimezoneOffset() * 60 : 0;
  const splits = [];
  for (let at = Math.ceil((low - offset) / step) * step + offset; at <= high; at += step) splits.push(at);
  return splits;
}

function timeLabels(splits, step) {
  let day = null;
  return splits.map((at) => {
    const date = new Date(at * 1000);
    const two = (value) => String(value).padStart(2, "0");
    const [today, time] = [
      `${two(date.getMonth() + 1)}-${two(date.getDate())}`,
      `${two(date.getHours())}:${two(date.getMinutes())}`,
    ];
    const fraction = step < 1 ? (date.getMilliseconds() / 1000).toFixed(3).slice(1) : "";
    const text = step >= 86400 ? today : step >= 60 ? time : `${time}:${two(date.getSeconds())}${fraction}`;
    const isNewDay = day !== null && day !== today;
    day = today;
    return isNewDay && step < 86400 ? `${today} ${text}` : text;
  });
}

/** Fill the band between two series, the higher one first. */
export const band = (higher, lower, color, alpha = 0.16) => ({
  series: [higher + 1, lower + 1],
  fill: faint(color, alpha),
});

/** Draw dashed lines where something was found, and crosses where values were not finite. */
export function paintMarks(u, findings, crosses) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const unit = devicePixelRatio;
  for (const { position, color } of findings) {
    const x = Math.round(u.valToPos(position, "x", true)) + 0.5;
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.lineWidth = unit;
    ctx.setLineDash([3 * unit, 3 * unit]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - 4 * unit, bbox.top);
    ctx.lineTo(x + 4 * unit, bbox.top);
    ctx.lineTo(x, bbox.top + 6 * unit);
    ctx.fill();
  }
  ctx.setLineDash([]);
  ctx.lineWidth = 1.75 * unit;
  for (const { position, color } of crosses) {
    const [x, y, size] = [u.valToPos(position, "x", true), bbox.top + 10 * unit, 3.5 * unit];
    ctx.strokeStyle = color;
    ctx.beginPath();
    for (const sign of [-1, 1]) {
      ctx.moveTo(x - size, y - sign * size);
      ctx.lineTo(x + size, y + sign * size);
    }
    ctx.stroke();
  }
  ctx.restore();
}
