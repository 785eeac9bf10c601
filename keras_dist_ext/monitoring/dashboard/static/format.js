/** Write numbers for people: four digits that matter, units that fit, nothing that jumps in width. */

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 0.012345 -> "0.01235", 12345.6 -> "12,346", 1.5e-9 -> "1.500e-9" */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // "NaN", "Infinity": as the server spells them
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(digits - 1);
  if (size >= 10 ** (digits - 1)) return WHOLE.format(value);
  return value.toPrecision(digits);
}

export const whole = (value) =>
  value === null || value === undefined ? "–" : typeof value === "string" ? value : WHOLE.format(value);

/** 0.0123 -> "12.3 ms" */
export function seconds(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return number(value);
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${trim(value * 1e6, digits)} µs`;
  if (size < 1) return `${trim(value * 1e3, digits)} ms`;
  if (size < 120) return `${trim(value, digits)} s`;
  return duration(value);
}

function trim(value, digits) {
  return Math.abs(value) >= 10 ** digits ? WHOLE.format(value) : value.toPrecision(digits);
}

/** 3725 -> "1h 2m 5s" */
export function duration(value) {
  if (value < 0) return "-" + duration(-value);
  if (value < 60) return `${Number(value.toFixed(value < 10 ? 2 : 1))}s`;
  const all = Math.round(value);
  const [days, hours, minutes, rest] = [all / 86400, (all % 86400) / 3600, (all % 3600) / 60, all % 60].map(Math.floor);
  const words = [
    [days, "d"],
    [hours, "h"],
    [minutes, "m"],
    [rest, "s"],
  ].filter(([count]) => count);
  return words
    .slice(0, 3)
    .map(([count, unit]) => count + unit)
    .join(" ");
}

/** 0.873 -> "87.3 %" */
export function percent(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return number(value);
  return `${Number((value * 100).toPrecision(digits))} %`;
}

/** 1240.3 -> "1,240", 1.25e6 -> "1.25M": short, for axes and rates. */
export function short(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return number(value);
  const size = Math.abs(value);
  for (const [from, unit, letter] of [
    [1e12, 1e12, "T"],
    [1e9, 1e9, "G"],
    [1e6, 1e6, "M"],
    [1e5, 1e3, "k"],
  ]) {
    if (size >= from) return `${Number((value / unit).toPrecision(4))}${letter}`;
  }
  if (size >= 1000) return WHOLE.format(value);
  return size >= 1 || size === 0 ? String(Number(value.toPrecision(4))) : number(value, 3);
}

/** Labels of an axis: `text` without zeros that say nothing, and more digits where labels would be the same. */
export function ticks(values, text = short) {
  const labels = values.map((value) =>
    value === null
      ? ""
      : text(value)
          .replace(/(\.\d*?)0+(?=\D|$)/, "$1")
          .replace(/\.(?=\D|$)/, ""),
  );
  const shown = labels.filter(Boolean);
  if (new Set(shown).size === shown.length) return labels;
  return values.map((value) => (value === null ? "" : String(Number(value.toPrecision(8)))));
}

/** Seconds since 1970 -> "14:03:22" */
export function clock(wall) {
  return new Date(wall * 1000).toLocaleTimeString("en-GB");
}

/** Seconds since 1970 -> "2026-11-21 14:03:22" */
export function dateTime(wall) {
  const date = new Date(wall * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(wall)}`;
}

/** "/job:worker/replica:0/task:1/device:GPU:0" -> "worker 1 · GPU:0" */
export function device(name) {
  const text = String(name);
  const match = /^(?:\/job:([^/]+))?(?:\/replica:\d+)?(?:\/task:(\d+))?\/device:(.+)$/.exec(text);
  if (!match) return text;
  const [, job, task, local] = match;
  return job && job !== "localhost" && task !== undefined ? `${job} ${task} · ${local}` : local;
}

export const experimentName = (name) => name || "(log directory)";

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** What a tag is called on the page, and how its numbers are written. */
export const METRICS = {
  "replica/loss": { title: "Loss", text: number, worst: "max" },
  "replica/examples_per_second": { title: "Examples per second", text: short, worst: "min" },
  "replica/step_seconds": { title: "Step time", text: seconds, worst: "max" },
  "replica/compute_seconds": { title: "Compute time", text: seconds, worst: "max" },
  "replica/input_seconds": { title: "Input time", text: seconds, worst: "max" },
  "replica/sync_seconds": { title: "Sync time", text: seconds, worst: "max" },
  "replica/gradient_norm": { title: "Gradient norm", text: number, worst: "max" },
  "replica/examples": { title: "Examples", text: whole, worst: "min" },
  "replica/score": { title: "Score", text: (value) => number(value, 3), worst: "min" },
};
