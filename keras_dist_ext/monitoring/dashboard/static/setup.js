/** What an experiment is: strategy and why, devices, seeds, versions; and what was found about it. */
import { device, duration, experimentName, isObject, whole } from "./format.js";
import { h, icon } from "./dom.js";

/** The strategy, its reason, and whatever else the manifest says; a hint where there is none. */
export function setupView(experiment) {
  if (isPlanOnly(experiment)) {
    return h(
      "div",
      { class: "setup" },
      experiment.notes.map((note) => h("p", { class: "hint" }, note)),
    );
  }
  const manifest = experiment.manifest ?? {};
  const strategy = isObject(manifest.strategy) ? manifest.strategy : {};
  const devices = Array.isArray(manifest.devices) ? manifest.devices : [];
  const replicas = strategy.num_replicas ?? experiment.replicas.length;
  const facts = [
    [plural(replicas, "replica"), strategy.num_workers ? `on ${plural(strategy.num_workers, "worker")}` : ""].join(" "),
    manifest.batch_size ? `global batch ${whole(manifest.batch_size)}` : null,
    manifest.host ? `host ${text(manifest.host)}` : null,
  ].filter(Boolean);
  return h(
    "div",
    { class: "setup" },
    h(
      "p",
      { class: "strategy" },
      h("strong", {}, strategy.name ? text(strategy.name) : "Strategy not recorded"),
      strategy.reason
        ? h("span", { class: "reason" }, h("span", { class: "term" }, "why"), text(strategy.reason))
        : null,
    ),
    h(
      "ul",
      { class: "facts" },
      facts.map((fact) => h("li", {}, fact)),
    ),
    h(
      "div",
      { class: "details" },
      devices.length
        ? details(
            "Devices",
            devicesSummary(devices),
            h(
              "ol",
              { class: "devices", start: 0 },
              devices.map((name, i) =>
                h("li", { value: i, title: text(name) }, h("span", { class: "index" }, i), device(text(name))),
              ),
            ),
          )
        : null,
      pairs("Seeds", manifest.seeds),
      pairs("Versions", manifest.versions),
    ),
    experiment.manifest || experiment.notes.length
      ? null
      : h(
          "p",
          { class: "hint" },
          "The run “all” with the manifest is missing: what is shown comes from the replicas’ own runs.",
        ),
    experiment.notes.map((note) => h("p", { class: "hint" }, note)),
  );
}

/** Whether nothing was trained here. */
export const isPlanOnly = (experiment) => Boolean(experiment.plan) && !experiment.replicas.length;

function details(title, summary, body) {
  return h(
    "details",
    {},
    h("summary", {}, h("span", { class: "term" }, title), h("span", { class: "brief" }, summary)),
    body,
  );
}

function pairs(title, value) {
  if (!isObject(value) || !Object.keys(value).length) return null;
  const flat = flatten(value);
  const brief =
    flat
      .slice(0, 3)
      .map(([key, word]) => `${key} ${word}`)
      .join(", ") + (flat.length > 3 ? ", …" : "");
  return details(
    title,
    brief,
    h(
      "dl",
      {},
      flat.map(([key, word]) => [h("dt", {}, key), h("dd", {}, word)]),
    ),
  );
}

/** {a: {b: 1}, c: [1, 2]} -> [["a b", "1"], ["c", "1, 2"]] */
function flatten(value, prefix = "") {
  return Object.entries(value).flatMap(([key, item]) =>
    isObject(item)
      ? flatten(item, `${prefix}${key} `)
      : [[prefix + key, Array.isArray(item) ? item.map(text).join(", ") : text(item)]],
  );
}

/** ["GPU:0", "GPU:1"] -> "2 GPU"; names of several kinds are counted by kind. */
function devicesSummary(devices) {
  const kinds = new Map();
  for (const name of devices) {
    const kind = /device:([^:/]+)/.exec(text(name))?.[1] ?? text(name);
    kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  }
  const brief = [...kinds]
    .slice(0, 3)
    .map(([kind, count]) => `${count} × ${kind}`)
    .join(", ");
  return kinds.size > 3 ? `${brief}, …` : brief;
}

const text = (value) =>
  typeof value === "string"
    ? value
    : typeof value === "number" || typeof value === "boolean"
      ? String(value)
      : value === null || value === undefined
        ? "none"
        : JSON.stringify(value);

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const KINDS = {
  divergence: { name: "Divergence", icon: "diverge", level: "bad" },
  straggler: { name: "Straggler", icon: "slow", level: "warn" },
  diagnosis: { name: "Diagnosis", icon: "info", level: "info" },
};

/** Findings, what costs most first; `onstep` is called with a step to look at. */
export function findingsView(experiment, onstep) {
  const findings = [...experiment.findings].sort((a, b) => rank(a) - rank(b) || (b.seconds ?? 0) - (a.seconds ?? 0));
  if (!findings.length) return null;
  return h(
    "section",
    { class: "findings", "aria-label": `Findings of ${experimentName(experiment.name)}` },
    h("h3", {}, `Findings`, h("span", { class: "count" }, findings.length)),
    h(
      "ul",
      {},
      findings.map((finding) => {
        const kind = KINDS[finding.kind] ?? { name: text(finding.kind ?? "Finding"), icon: "warning", level: "warn" };
        return h(
          "li",
          { class: `finding ${kind.level}`, "data-kind": text(finding.kind) },
          h(
            "div",
            { class: "finding-kind" },
            icon(kind.icon),
            kind.name,
            finding.code ? h("code", {}, text(finding.code)) : null,
            typeof finding.step === "number"
              ? h(
                  "button",
                  {
                    type: "button",
                    class: "link",
                    onclick: () => onstep(finding.step),
                    title: "Zoom the charts to this step",
                  },
                  `step ${whole(finding.step)}`,
                )
              : null,
            typeof finding.seconds === "number"
              ? h("span", { class: "cost" }, `costs ${duration(finding.seconds)}`)
              : null,
          ),
          h("p", { class: "what" }, text(finding.what ?? "")),
          finding.evidence ? h("p", { class: "evidence" }, text(finding.evidence)) : null,
          finding.fix ? h("p", { class: "fix" }, h("span", { class: "term" }, "What to do"), withCode(finding.fix)) : null,
        );
      }),
    ),
  );
}

/** What stands between backticks is code. */
export const withCode = (value) =>
  text(value)
    .split("`")
    .map((part, i) => (i % 2 ? h("code", {}, part) : part));

const rank = ({ kind }) => ["divergence", "straggler", "diagnosis"].indexOf(kind) + 1 || 4;
