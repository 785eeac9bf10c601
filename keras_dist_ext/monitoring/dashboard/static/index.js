/**
 * The Replicas tab of TensorBoard. TensorBoard imports this module in a frame of its own and calls `render`.
 *
 * For tests and the console there is `window.replicasDashboard`:
 *   idle               whether everything asked for has been drawn
 *   state              what has been chosen (state.js)
 *   drawn(name)        what each chart of an experiment has drawn: {loss: {x, series}, heatmap, split, table, ...}
 *   comparison()       the same for the comparison
 *   png(name, chart)   the picture that the PNG button saves, as a data URL
 */
import { getExperiments } from "./api.js";
import { h } from "./dom.js";
import { followTheme, getUrlData, onDataReloaded } from "./host.js";
import { on, recall, set, state } from "./state.js";

// In the order in which they overrule each other.
const STYLES = ["theme", "toolbar", "panels", "charts", "tables", "plan", "media"].map((name) => `styles/${name}.css`);

// Ask at once: TensorBoard reads while the other modules of the page are loading.
const asked = getExperiments();
asked.catch(() => {}); // the page says so
const loading = import("./page.js");

/** What TensorBoard calls. */
export async function render() {
  document.documentElement.lang = "en";
  document.title = "Replicas";
  const [{ Page }] = await Promise.all([loading, styles("vendor/uplot/uPlot.min.css", ...STYLES)]);
  let page = null;
  followTheme(() => page?.redraw());
  const fromUrl = getUrlData();
  recall(fromUrl);
  // A zoom in one unit means another part of the run in another one.
  let axis = state.axis;
  on(["axis"], () => {
    const zoom = state.zoom && page.panels()[0]?.convert(state.zoom, axis, state.axis);
    axis = state.axis;
    page.panels().forEach((panel) => panel.refreshExtents());
    set({ zoom: zoom ?? null });
  });
  page = new Page();
  page.asked = fromUrl.experiment;
  document.body.append(page.element);
  window.replicasDashboard = {
    state,
    get idle() {
      return page.busy === 0;
    },
    drawn: (name) =>
      Object.fromEntries((page.held.get(name)?.charts ?? []).map((chart) => [chart.kind, chart.drawn()])),
    comparison: () => page.comparison?.drawn() ?? null,
    png: (name, kind) => {
      const { card } = page.held.get(name).chart(kind);
      return card.picture().toDataURL();
    },
  };
  onDataReloaded(() => page.refresh());
  await page.refresh(asked);
}

/** Load style sheets, and wait for them: a chart measures itself when it is made. */
function styles(...names) {
  return Promise.all(
    names.map(
      (name) =>
        new Promise((resolve) => {
          const link = h("link", {
            rel: "stylesheet",
            href: new URL(name, import.meta.url).href,
            onload: resolve,
            onerror: resolve,
          });
          document.head.append(link);
        }),
    ),
  );
}
