/** What the person has chosen: one object for the whole page, and whom to tell when a part of it changes. */

const REMEMBERED = ["axis", "smoothing", "log", "throughput", "heat", "split"];
const STORE = "keras_dist_ext.replicas";

export const state = {
  experiments: [], // as the server lists them
  selected: [], // names
  axis: "step", // step, relative (seconds since the experiment's start) or wall
  smoothing: 0, // 0 to 0.99, as TensorBoard's
  log: false,
  linked: true, // whether compared experiments share their scales
  zoom: null, // {low, high} in the axis' unit; null: everything
  throughput: "replicas", // replicas, stacked or total
  heat: "replica/step_seconds", // tag that the heat map shows
  split: "seconds", // seconds or share
  hidden: new Map(), // experiment -> Set of replicas
  extents: new Map(), // "experiment tag" -> [low, high] of the data in the axis' unit
};

const listeners = [];

/** Call back with the set of changed names, when one of `names` has changed. */
export function on(names, callback) {
  listeners.push({ names, callback });
}

/** Change parts of the state. */
export function set(changes) {
  const changed = new Set(Object.keys(changes).filter((name) => state[name] !== changes[name]));
  if (!changed.size) return;
  Object.assign(state, changes);
  remember();
  for (const { names, callback } of listeners) {
    if (names.some((name) => changed.has(name))) callback(changed);
  }
}

export const hiddenOf = (experiment) => state.hidden.get(experiment) ?? new Set();

/** Hide these replicas of an experiment, and no others. */
export function setHidden(experiment, replicas) {
  set({ hidden: new Map(state.hidden).set(experiment, new Set(replicas)) });
}

/** From where to where charts go: the zoom, or all that any chart has, so that all charts are in line. */
export function xRange() {
  if (state.zoom) return [state.zoom.low, state.zoom.high];
  const extents = [...state.extents.values()];
  if (!extents.length) return [0, 1];
  const low = Math.min(...extents.map((extent) => extent[0]));
  const high = Math.max(...extents.map((extent) => extent[1]));
  return low < high ? [low, high] : [low - 1, high + 1];
}

/** Zoom to a part of the axis; null resets. Too little to see resets nothing and changes nothing. */
export function zoomTo(low, high) {
  if (low === null) return set({ zoom: null });
  const least = state.axis === "step" ? 1 : 1e-3;
  if (!(high - low >= least)) {
    const middle = (low + high) / 2;
    [low, high] = [middle - least / 2, middle + least / 2];
  }
  set({ zoom: { low, high } });
}

function remember() {
  try {
    localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(REMEMBERED.map((name) => [name, state[name]]))));
  } catch {
    // Storage may be off; then nothing is remembered.
  }
}

/** Start with what was chosen last time, then with what TensorBoard's address says. */
export function recall(fromUrl) {
  let remembered = {};
  try {
    remembered = JSON.parse(localStorage.getItem(STORE) ?? "{}") ?? {};
  } catch {
    // Nothing, or nothing of ours.
  }
  const chosen = { ...remembered, ...fromUrl };
  const oneOf = (name, values) => values.includes(chosen[name]) && (state[name] = chosen[name]);
  oneOf("axis", ["step", "relative", "wall"]);
  oneOf("throughput", ["replicas", "stacked", "total"]);
  oneOf("heat", ["replica/step_seconds", "replica/compute_seconds", "replica/input_seconds", "replica/sync_seconds"]);
  oneOf("split", ["seconds", "share"]);
  const smoothing = Number(chosen.smoothing);
  if (smoothing >= 0 && smoothing <= 0.99) state.smoothing = smoothing;
  state.log = chosen.log === true || chosen.log === "true";
}
