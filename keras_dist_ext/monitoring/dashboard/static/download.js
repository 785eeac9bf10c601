/** Save what is on the page as files. */
import { cssColor } from "./colors.js";
import { h } from "./dom.js";

/** Have the browser save what is at an address; what the page makes itself is in a data URL. */
export function download(url, name) {
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

export const textUrl = (text, type) => `data:${type};charset=utf-8,${encodeURIComponent(text)}`;

/** A name of letters, digits and dashes. */
export const fileName = (name) =>
  name
    .replace(/[^A-Za-z0-9]+/g, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 80) || "replicas";

/** A cell of CSV; what a spreadsheet would take for a formula is text. */
export function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) && !/^-?(Infinity|[0-9.]+)$/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csvText = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

/** One picture of a chart, with its title and its legend: [{color, text}], as a canvas. */
export function paintPng({ title, subtitle, canvases, legend = [] }) {
  const unit = devicePixelRatio;
  const width = Math.max(...canvases.map((canvas) => canvas.width));
  const columns = Math.max(1, Math.floor(width / (110 * unit)));
  const rows = Math.ceil(legend.length / columns);
  const [margin, top, line] = [16 * unit, 56 * unit, 18 * unit];
  const canvas = h("canvas", {
    width: width + 2 * margin,
    height: top + canvases.reduce((sum, { height }) => sum + height, 0) + rows * line + 2 * margin,
  });
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = cssColor("--surface");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  const text = (words, x, y, size, color, weight = 400) => {
    ctx.font = `${weight} ${size * unit}px Roboto, "Segoe UI", system-ui, sans-serif`;
    ctx.fillStyle = color;
    ctx.fillText(words, x, y);
  };
  text(title, margin, 30 * unit, 16, cssColor("--ink"), 600);
  text(subtitle, margin, 48 * unit, 12, cssColor("--ink-soft"));
  let y = top + margin / 2;
  for (const source of canvases) {
    ctx.drawImage(source, margin, y);
    y += source.height;
  }
  legend.forEach(({ color, text: words }, i) => {
    const x = margin + (i % columns) * ((width - margin) / columns);
    const base = y + margin / 2 + Math.floor(i / columns) * line;
    ctx.fillStyle = color;
    ctx.fillRect(x, base, 10 * unit, 10 * unit);
    text(words, x + 15 * unit, base + 9 * unit, 11, cssColor("--ink-soft"));
  });
  return canvas;
}
