/**
 * Colours that people with any colour vision can tell apart, for a light and a dark page.
 *
 * Up to eight replicas: Okabe and Ito's set, darkened or lightened until it has 3:1 contrast to the page. More: a ramp
 * of rising lightness, so that neighbours (often of one worker) look alike and the ends do not. Heat: one ramp from
 * nearly the page's colour (fast) to what is farthest from it (slow), lightness strictly monotone.
 */

const FEW = {
  light: ["#0067a5", "#c45100", "#00845e", "#a83c86", "#9a6a00", "#2b8cc4", "#5b4bb5", "#5c6670"],
  dark: ["#56b4e9", "#ff8f57", "#2fc79a", "#e08fc0", "#e6b422", "#9adcf7", "#a99bf5", "#b4bcc4"],
};
const MANY = {
  light: ["#30206f", "#31508f", "#22788f", "#1d9078", "#5c9a3c", "#a08a10", "#c46a1e", "#b83a4b", "#8a2272"],
  dark: ["#b9a3ff", "#7fa8f5", "#4fc0e0", "#4ed3b0", "#93d873", "#d9cf57", "#f5a95f", "#f58080", "#e58fce"],
};
const HEAT = {
  light: ["#fdf0d5", "#fbd896", "#f8b26a", "#e87a42", "#c53d3a", "#861b46", "#420f38"],
  dark: ["#352f52", "#553068", "#7c2f6c", "#bd3c5d", "#ec6a45", "#f8a84b", "#fbf0a8"],
};
const PARTS = {
  light: { compute: "#0067a5", input: "#e08a00", sync: "#8a97a6" },
  dark: { compute: "#4aa8e0", input: "#f0b03c", sync: "#7d8896" },
};

export const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");

/** The colour of a replica, by its place among all replicas of its experiment. */
export function replicaColor(index, count) {
  const few = FEW[theme()];
  return count <= few.length ? few[index % few.length] : ramp(MANY[theme()], index / Math.max(1, count - 1));
}

export const experimentColor = (index) => FEW[theme()][index % FEW.light.length];

export const partColor = (part) => PARTS[theme()][part];

/** The colour of a share, 0 (fast) to 1 (slow). */
export const heatColor = (share) => ramp(HEAT[theme()], share);

export const heatGradient = () => `linear-gradient(to right, ${HEAT[theme()].join(", ")})`;

function ramp(stops, share) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(at));
  const [from, to] = [stops[index], stops[index + 1]].map(channels);
  return `rgb(${from.map((channel, i) => Math.round(channel + (to[i] - channel) * (at - index))).join(" ")})`;
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** The same colour, see-through. */
export function faint(color, alpha) {
  const rgb = color.startsWith("#") ? channels(color) : color.match(/\d+/g).slice(0, 3).map(Number);
  return `rgb(${rgb.join(" ")} / ${alpha})`;
}

/** A colour of the style sheet, for canvases. */
export const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
