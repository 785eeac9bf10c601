/** What more replicas would give (kde.plan): the curve with its intervals, what was trained, and the numbers. */
import { cssColor, experimentColor } from "./colors.js";
import { csvText } from "./download.js";
import { fill, h, segmented, svg } from "./dom.js";
import { experimentName, isObject, number, percent, seconds, short, ticks, whole } from "./format.js";
import { withCode } from "./setup.js";
import { Card } from "./charts/card.js";

const WIDTH = 720;
const HEIGHT = 280;
const PAD = { left: 64, right: 16, top: 14, bottom: 40 };
const MOST_WHAT_IFS = 3;

export class PlanCard {
  constructor(panel) {
    this.panel = panel;
    this.kind = "plan";
    this.chosen = null;
    this.modes = h("div", {});
    this.card = new Card({
      kind: "plan",
      title: "Plan: what more replicas would give",
      about: panel.about,
      controls: [this.modes],
      csv: () => ({ text: this.csv() }),
    });
  }

  get element() {
    return this.card.element;
  }

  /** `plan` is what Plan.to_dict gives, as far as it is there; `trained` is what getTrained does. */
  show(plan, trained) {
    this.plan = plan;
    this.trained = trained;
    this.curves = curvesOf(plan);
    const kinds = [...this.curves.keys()];
    if (!kinds.length) return this.card.setStatus("empty", "This plan has no numbers of replicas.");
    if (!kinds.includes(this.chosen)) this.chosen = kinds[0];
    const choices = kinds.map((kind) => [kind, kind[0].toUpperCase() + kind.slice(1), `Curve at a ${kind}`]);
    const choose = (kind) => {
      this.chosen = kind;
      this.redraw();
    };
    fill(this.modes, segmented("Divide batches by", choices, this.chosen, choose).element);
    this.card.setStatus("");
    return this.redraw();
  }

  /** What was trained on as many examples as a point has. */
  trainedAt(point) {
    return this.trained.filter((one) => one.replicas === point.replicas && one.global_batch === point.global_batch);
  }

  redraw() {
    if (!this.curves?.size) return;
    const { points, advice, whatIfs } = this.curves.get(this.chosen);
    fill(
      this.card.body,
      h("p", { class: "plan-advice" }, text(advice)),
      this.chart(points),
      h(
        "div",
        { class: "plan-legend" },
        key("line", "predicted, with 95% interval"),
        key("ideal", "as many times one replica"),
        points.some((point) => this.trainedAt(point).length) ? key("trained", "trained in this log directory") : null,
      ),
      h("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Table of the plan" }, this.table(points)),
      whatIfs.length
        ? h(
            "p",
            { class: "plan-change" },
            h("span", { class: "term" }, "What to change first"),
            h(
              "ul",
              {},
              whatIfs
                .slice(0, MOST_WHAT_IFS)
                .map(({ code, change, factor }) =>
                  h("li", {}, h("code", {}, text(code)), ` up to ${number(factor, 2)}x: `, withCode(change)),
                ),
            ),
          )
        : null,
      this.about(),
    );
  }

  about() {
    const assumptions = Array.isArray(this.plan.assumptions) ? this.plan.assumptions : [];
    return h(
      "details",
      { class: "plan-about" },
      h("summary", {}, h("span", { class: "term" }, "Measured and assumed")),
      this.plan.headline ? h("p", {}, `${text(this.plan.headline)}.`) : null,
      h(
        "ul",
        {},
        assumptions.map((sentence) => h("li", {}, text(sentence))),
      ),
    );
  }

  chart(points) {
    const rates = points.flatMap((point) => [point.rate.high, ...this.trainedAt(point).map(rateOf)]);
    const most = Math.max(...rates) * 1.08 || 1;
    const [first, last] = [points[0].replicas, points.at(-1).replicas];
    const inner = { width: WIDTH - PAD.left - PAD.right, height: HEIGHT - PAD.top - PAD.bottom };
    const place = (replicas) =>
      first === last ? 0.5 : (Math.log(replicas) - Math.log(first)) / (Math.log(last) - Math.log(first));
    const x = (replicas) => PAD.left + inner.width * (0.04 + 0.92 * place(replicas));
    const y = (rate) => PAD.top + inner.height * (1 - Math.min(rate, most) / most);
    const steps = niceSteps(most);
    const labels = ticks(steps);
    const one = points[0].rate.value / (points[0].speedup || 1);
    const ideal = range(24).map((i) => first * (last / first) ** (i / 23));
    const grid = cssColor("--grid");
    const ink = cssColor("--ink-soft");
    const color = experimentColor(0);
    return svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plan-chart", role: "img", "aria-label": this.description(points) },
      steps.map((rate, i) => [
        svg("line", { x1: PAD.left, x2: WIDTH - PAD.right, y1: y(rate), y2: y(rate), stroke: grid }),
        svg("text", { x: PAD.left - 8, y: y(rate) + 4, "text-anchor": "end", fill: ink }, labels[i]),
      ]),
      points.map((point) =>
        svg(
          "text",
          { x: x(point.replicas), y: HEIGHT - PAD.bottom + 18, "text-anchor": "middle", fill: ink },
          whole(point.replicas),
        ),
      ),
      svg("text", { x: WIDTH / 2, y: HEIGHT - 4, "text-anchor": "middle", fill: ink }, "replicas"),
      svg("text", { x: 12, y: PAD.top + 2, fill: ink }, "examples/s"),
      svg("polyline", {
        points: ideal
          .filter((replicas) => one * replicas <= most)
          .map((replicas) => `${x(replicas)},${y(one * replicas)}`)
          .join(" "),
        class: "ideal",
        stroke: ink,
      }),
      points.map((point) =>
        svg("line", {
          x1: x(point.replicas),
          x2: x(point.replicas),
          y1: y(point.rate.low),
          y2: y(point.rate.high),
          stroke: color,
          class: "interval",
        }),
      ),
      svg("polyline", {
        points: points.map((point) => `${x(point.replicas)},${y(point.rate.value)}`).join(" "),
        class: "curve",
        stroke: color,
      }),
      points.map((point) =>
        svg(
          "circle",
          { cx: x(point.replicas), cy: y(point.rate.value), r: 4, fill: color },
          svg("title", {}, `${whole(point.replicas)} replicas: ${short(point.rate.value)} examples/s, ${point.bound}`),
        ),
      ),
      points.flatMap((point) =>
        this.trainedAt(point).map((run) =>
          svg(
            "rect",
            { x: x(point.replicas) - 5, y: y(rateOf(run)) - 5, width: 10, height: 10, class: "trained" },
            svg("title", {}, `${experimentName(run.experiment)}: ${short(rateOf(run))} examples/s`),
          ),
        ),
      ),
    );
  }

  description(points) {
    const words = points.map((point) => `${whole(point.replicas)} replicas ${short(point.rate.value)}`);
    return `Examples a second: ${words.join(", ")}`;
  }

  table(points) {
    const hasMemory = points.some(({ memory }) => typeof memory === "number");
    const isTrained = points.some((point) => this.trainedAt(point).length);
    const heads = [
      "Replicas",
      "Examples each",
      "Step",
      "Examples/s",
      "95% interval",
      "Speed-up",
      "Efficiency",
      ...(hasMemory ? ["Memory"] : []),
      ...(isTrained ? ["Trained, examples/s"] : []),
      "Bound",
    ];
    const { pays } = this.curves.get(this.chosen);
    return h(
      "table",
      { class: "plan" },
      h("caption", { class: "visually-hidden" }, `Plan of ${this.panel.title}, ${this.chosen}`),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head) => h("th", { scope: "col" }, head)),
        ),
      ),
      h(
        "tbody",
        {},
        points.map((point) =>
          h(
            "tr",
            { class: point.replicas === pays ? "pays" : null, title: point.replicas === pays ? "The most that pay" : null },
            h("th", { scope: "row" }, whole(point.replicas)),
            h("td", {}, whole(point.each)),
            h("td", {}, seconds(point.step)),
            h("td", {}, short(point.rate.value)),
            h("td", {}, `${short(point.rate.low)} to ${short(point.rate.high)}`),
            h("td", {}, `${number(point.speedup, 3)}x`),
            h("td", {}, percent(point.efficiency)),
            hasMemory ? h("td", {}, bytes(point.memory)) : null,
            isTrained
              ? h("td", { class: "trained" }, this.trainedAt(point).map(rateOf).map(short).join(", ") || "–")
              : null,
            h("td", {}, point.bound),
          ),
        ),
      ),
    );
  }

  csv() {
    const head = ["curve", "replicas", "examples_each", "step_seconds", "examples_per_second", "low", "high", "bound"];
    const rows = [...this.curves].flatMap(([kind, { points }]) =>
      points.map(({ replicas, each, step, rate, bound }) => [
        kind,
        replicas,
        each,
        step,
        rate.value,
        rate.low,
        rate.high,
        bound,
      ]),
    );
    return csvText([head, ...rows]);
  }

  drawn() {
    if (!this.curves?.size) return null;
    const { points } = this.curves.get(this.chosen);
    return {
      kind: "plan",
      curve: this.chosen,
      points: points.map((point) => ({
        replicas: point.replicas,
        examples_per_second: point.rate.value,
        trained: this.trainedAt(point).map(rateOf),
      })),
    };
  }

  highlight() {}

  destroy() {}
}

/** The curves that can be drawn, by kind: a log may hold anything. */
function curvesOf(plan) {
  const found = new Map();
  for (const [kind, curve] of Object.entries(isObject(plan?.curves) ? plan.curves : {})) {
    const points = (Array.isArray(curve?.points) ? curve.points : [])
      .map((point) => ({
        replicas: point?.replicas,
        global_batch: point?.global_batch,
        each: point?.batch_per_replica,
        step: point?.step_seconds?.value,
        rate: point?.examples_per_second,
        speedup: point?.speedup?.value,
        efficiency: point?.efficiency?.value,
        memory: point?.memory_bytes,
        bound: text(point?.bound ?? ""),
      }))
      .filter(({ replicas, rate }) => replicas >= 1 && [rate?.low, rate?.value, rate?.high].every(Number.isFinite))
      .sort((a, b) => a.replicas - b.replicas);
    const whatIfs = (Array.isArray(curve?.what_ifs) ? curve.what_ifs : []).filter(isObject);
    if (points.length) found.set(kind, { points, advice: curve.advice ?? "", pays: curve.pays, whatIfs });
  }
  return found;
}

const rateOf = (run) => run.examples_per_second;

const range = (count) => Array.from({ length: count }, (_, i) => i);

function niceSteps(most) {
  const rough = most / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((one) => one >= rough);
  return range(Math.floor(most / step) + 1).map((i) => i * step);
}

function bytes(value) {
  if (typeof value !== "number") return "–";
  return value >= 1e9 ? `${number(value / 1e9, 3)} GB` : `${number(value / 1e6, 3)} MB`;
}

const key = (kind, words) => h("span", { class: `plan-key ${kind}` }, h("span", { class: "mark", "aria-hidden": "true" }), words);

const text = (value) => (typeof value === "string" ? value.replaceAll("`", "") : JSON.stringify(value) ?? "");
