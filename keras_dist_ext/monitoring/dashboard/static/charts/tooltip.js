/** The values under the cursor, beside it. */
import { fill, h } from "../dom.js";

let box = null;

/** Show rows of {color, name, value, strong} under a title, near the cursor of a uPlot. */
export function showTooltip(u, title, rows) {
  if (!box) {
    box = h("div", { class: "tooltip", "aria-hidden": "true" });
    document.body.append(box);
  }
  fill(
    box,
    h("div", { class: "tooltip-title" }, title),
    rows.map(({ color, name, value, strong }) =>
      h(
        "div",
        { class: strong ? "tooltip-row strong" : "tooltip-row" },
        color ? h("span", { class: "swatch", style: { background: color } }) : h("span", { class: "swatch none" }),
        h("span", { class: "tooltip-name" }, name),
        h("span", { class: "tooltip-value" }, value),
      ),
    ),
  );
  box.hidden = false;
  const over = u.over.getBoundingClientRect();
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const x = over.left + u.cursor.left;
  const left = x + 18 + width < window.innerWidth ? x + 18 : x - 18 - width;
  const top = Math.min(Math.max(8, over.top + u.cursor.top - height / 2), Math.max(8, window.innerHeight - height - 8));
  box.style.transform = `translate(${Math.round(Math.max(4, left))}px, ${Math.round(top)}px)`;
}

export function hideTooltip() {
  if (box) box.hidden = true;
}

/** At most `most` of many rows, sorted by value: the highest and the lowest, and the one that is meant. */
export function thinRows(rows, most = 11) {
  if (rows.length <= most) return rows;
  const half = Math.floor((most - 2) / 2);
  const middle = rows.slice(half, -half).filter((row) => row.strong);
  const left = rows.length - 2 * half - middle.length;
  return [...rows.slice(0, half), ...middle, { name: `… ${left} more`, value: "" }, ...rows.slice(-half)];
}
