/** The most important numbers. */
import { h } from "./dom.js";
import { number, percent, seconds, short } from "./format.js";

/** The available numbers of a panel's summary, as tiles. */
export function tilesView(panel) {
  return facts(panel.summary)
    .filter(Boolean)
    .map(({ key, label, value, note, level }) =>
      h(
        "div",
        { class: level ? `tile ${level}` : "tile", "data-tile": key },
        h("div", { class: "tile-label" }, label),
        h("div", { class: "tile-value" }, value),
        h("div", { class: "tile-note" }, note ?? " "),
      ),
    );
}

function facts(summary) {
  const { overall } = summary;
  const held = (tag) => overall[tag] ?? null;
  const [loss, rate, efficiency, waiting, step] = [
    "all/loss",
    "all/examples_per_second",
    "all/scaling_efficiency",
    "all/input_share",
    "replica/step_seconds",
  ].map(held);
  const slowest = slowestOf(summary);
  const inParallel = summary.replicas.length > 1 && efficiency; // one replica is as fast as itself
  return [
    loss && {
      key: "loss",
      label: "Loss",
      value: number(loss.last ?? loss.mean),
      note: loss.last === undefined ? "mean of the replicas" : `mean ${number(loss.mean)}`,
    },
    rate && {
      key: "throughput",
      label: "Examples per second",
      value: short(rate.mean),
      note: rate.last === undefined ? "all replicas, mean" : `now ${short(rate.last)}`,
    },
    step && { key: "step", label: "Step time", value: seconds(step.mean), note: "mean" },
    inParallel && {
      key: "efficiency",
      label: "Scaling efficiency",
      value: percent(efficiency.mean),
      note: "relative to the fastest replica",
      level: efficiency.mean < 0.6 ? "warn" : "",
    },
    waiting && {
      key: "input",
      label: "Waiting for input",
      value: percent(waiting.mean),
      note: "of a step’s time",
      level: waiting.mean > 0.3 ? "warn" : "",
    },
    slowest && {
      key: "slowest",
      label: "Slowest replica",
      value: String(slowest.id),
      note: `${number(1 / slowest.relative, 3)} × the busy time of the fastest`,
      level: slowest.relative < 0.75 ? "warn" : "",
    },
  ];
}

/** The replica with the longest busy time; null for a single replica, or where it is unknown. */
export function slowestOf({ replicas }) {
  const known = replicas.filter(({ relative }) => typeof relative === "number" && relative > 0);
  if (known.length < 2) return null;
  return known.reduce((worst, one) => (one.relative < worst.relative ? one : worst));
}
