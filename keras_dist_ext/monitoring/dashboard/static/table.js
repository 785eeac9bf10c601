/** The table of replicas: last, mean, spread and worst value of each metric, all examples, and scores; sortable. */
import { csvText } from "./download.js";
import { fill, h } from "./dom.js";
import { METRICS, number, whole } from "./format.js";
import { hiddenOf } from "./state.js";
import { Card } from "./charts/card.js";

const GROUPS = ["replica/loss", "replica/step_seconds", "replica/examples_per_second"];

/** {key, group, label, title, value(replica), text(value), worst: "max" | "min" | null} */
function columnsOf(summary) {
  const columns = [];
  for (const tag of GROUPS) {
    if (!summary.replicas.some(({ numbers }) => numbers[tag])) continue;
    const { title, text, worst } = METRICS[tag];
    const stat = (key, label, help, value, mark) =>
      columns.push({
        key: `${tag}:${key}`,
        group: title,
        label,
        title: `${title}: ${help}`,
        text,
        worst: mark,
        value: (replica) => (replica.numbers[tag] ? value(replica.numbers[tag]) : null),
      });
    stat("last", "Last", "the newest value", (n) => n.last, null);
    stat("mean", "Mean", "mean over the visible steps", (n) => n.mean, worst);
    stat("spread", "Spread", "standard deviation over the visible steps", (n) => n.std, null);
    stat("worst", "Worst", `${worst === "max" ? "highest" : "lowest"} visible value`, (n) => n[worst], worst);
  }
  columns.push({
    key: "examples",
    group: "Examples",
    label: "Total",
    title: "Examples of the replica in the visible steps",
    text: whole,
    worst: "min",
    value: (replica) => replica.examples,
    atLeast: (replica) => replica.examples_sampled,
  });
  columns.push({
    key: "relative",
    group: "Score",
    label: "vs fastest",
    title: "Busy time of a step (compute and input) of the fastest replica, divided by that of this one: 1 is as fast",
    text: (value) => number(value, 3),
    worst: "min",
    value: (replica) => replica.relative,
  });
  columns.push({
    key: "score",
    group: "Score",
    label: "vs own best",
    title: "Score recorded in training: the replica compared with its own best; 1 is as fast as ever",
    text: (value) => number(value, 3),
    worst: "min",
    value: (replica) => replica.score,
  });
  return columns.filter(({ value }) =>
    summary.replicas.some((replica) => value(replica) !== null && value(replica) !== undefined),
  );
}

export class ReplicaTable {
  constructor(panel) {
    this.panel = panel;
    this.kind = "table";
    this.sort = { key: "replica", descending: false };
    this.table = h("table", { class: "replicas" });
    this.card = new Card({
      kind: "table",
      title: "Replicas",
      about: panel.about,
      csv: () => ({ text: this.csv() }),
    });
    this.card.body.append(
      h("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Table of replicas" }, this.table),
    );
  }

  get element() {
    return this.card.element;
  }

  show(summary) {
    this.summary = summary;
    this.redraw();
  }

  rows() {
    const hidden = hiddenOf(this.panel.name);
    const rows = this.summary.replicas.filter(({ id }) => !hidden.has(id));
    const column = this.columns.find(({ key }) => key === this.sort.key);
    const value = column ? (row) => sortable(column.value(row), this.sort.descending) : (row) => row.id;
    const sign = this.sort.descending ? -1 : 1;
    return rows.sort((a, b) => sign * (value(a) - value(b)) || a.id - b.id);
  }

  redraw() {
    if (!this.summary) return;
    this.columns = columnsOf(this.summary);
    if (!this.summary.replicas.length) return this.card.setStatus("empty", "No replicas in this log.");
    this.card.setStatus("");
    const rows = this.rows();
    const worst = new Map(this.columns.map((column) => [column.key, worstOf(column, rows)]));
    const groups = [];
    for (const { group } of this.columns) {
      if (groups.at(-1)?.group === group) groups.at(-1).span += 1;
      else groups.push({ group, span: 1 });
    }
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    fill(
      this.table,
      h("caption", { class: "visually-hidden" }, `Numbers of each replica of ${this.panel.title}`),
      h(
        "thead",
        {},
        h(
          "tr",
          { class: "groups" },
          h("td", { colspan: 2 }),
          groups.map(({ group, span }) => h("th", { colspan: span, scope: "colgroup" }, group)),
        ),
        h(
          "tr",
          {},
          this.head({ key: "replica", label: "Replica", title: "Replica" }),
          h("th", { scope: "col", class: "device" }, "Device"),
          this.columns.map((column, i) => this.head(column, this.columns[i - 1]?.group !== column.group)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) => this.row(row, worst)),
      ),
    );
    if (focused) this.table.querySelector(`button[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  head({ key, label, title }, first = false) {
    const sorted = this.sort.key === key ? (this.sort.descending ? "descending" : "ascending") : "none";
    return h(
      "th",
      { scope: "col", "aria-sort": sorted, class: first ? "first" : null },
      h(
        "button",
        { type: "button", "data-key": key, title, onclick: () => this.sortBy(key) },
        label,
        h(
          "span",
          { class: "arrow", "aria-hidden": "true" },
          sorted === "none" ? "" : sorted === "ascending" ? "▲" : "▼",
        ),
      ),
    );
  }

  sortBy(key) {
    this.sort = { key, descending: this.sort.key === key ? !this.sort.descending : key !== "replica" };
    this.redraw();
  }

  row(row, worst) {
    return h(
      "tr",
      {
        "data-replica": row.id,
        onpointerenter: () => this.panel.highlight(row.id, this),
        onpointerleave: () => this.panel.highlight(null, this),
      },
      h(
        "th",
        { scope: "row" },
        h("span", { class: "swatch", style: { background: this.panel.color(row.id) } }),
        row.id,
      ),
      h("td", { class: "device", title: this.panel.fullDeviceOf(row.id) }, this.panel.deviceOf(row.id)),
      this.columns.map((column, i) => {
        const value = column.value(row);
        const isWorst = worst.get(column.key) === row.id;
        const bad = typeof value === "string";
        const classes = [isWorst || bad ? "worst" : "", this.columns[i - 1]?.group !== column.group ? "first" : ""]
          .join(" ")
          .trim();
        return h(
          "td",
          {
            class: classes || null,
            "data-key": column.key,
            title: isWorst
              ? "Worst of the visible replicas"
              : column.atLeast?.(row)
                ? "At least: TensorBoard dropped points"
                : null,
          },
          isWorst ? h("span", { class: "mark", "aria-label": "worst: " }, "▾") : null,
          column.atLeast?.(row) && value !== null ? "≥ " : null,
          column.text(value),
        );
      }),
    );
  }

  csv() {
    const columns = this.columns;
    const head = ["replica", "device", ...columns.map(({ key }) => key.replace("replica/", "").replace(":", "_"))];
    return csvText([
      head,
      ...this.rows().map((row) => [row.id, this.panel.fullDeviceOf(row.id), ...columns.map(({ value }) => value(row))]),
    ]);
  }

  highlight() {}

  zoom() {}

  drawn() {
    if (!this.summary) return null;
    return {
      kind: "table",
      columns: this.columns.map(({ key }) => key),
      rows: this.rows().map((row) => ({
        replica: row.id,
        values: this.columns.map(({ value }) => value(row) ?? null),
      })),
    };
  }

  destroy() {}
}

/** Missing numbers are last in either sort order. */
function sortable(value, descending) {
  return typeof value === "number" ? value : descending ? -Infinity : Infinity;
}

/** The worst replica of a column, if there is one that is visibly worse than the best. */
export function worstOf({ value, text, worst }, rows) {
  if (!worst || rows.length < 2) return null;
  const known = rows.filter((row) => typeof value(row) === "number");
  if (known.length < 2) return null;
  const sign = worst === "max" ? 1 : -1;
  const sorted = [...known].sort((a, b) => sign * (value(b) - value(a)));
  const [first, second, best] = [sorted[0], sorted[1], sorted.at(-1)].map(value);
  return first === second || text(first) === text(best) ? null : sorted[0].id;
}
