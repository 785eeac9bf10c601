/** Ask the plugin's routes; relative, so that they work under any path prefix and experiment. */

/** What there is: experiments with their replicas, tags, manifest and findings. */
export function getExperiments(signal) {
  return getJson("experiments", {}, signal);
}

/** The lines of a tag: {steps, walls, ends?, wall_ends?, replicas, overall, extent, start, sampled, exact}. */
export function getSeries(experiment, tag, range, width, signal) {
  return getJson("series", { experiment, tag, width, ...range }, signal);
}

/** Numbers of each replica. */
export function getSummary(experiment, range, signal) {
  return getJson("summary", { experiment, ...range }, signal);
}

/** How fast experiments trained: [{experiment, replicas, global_batch, examples_per_second}, ...]. */
export async function getTrained(signal) {
  return (await getJson("trained", {}, signal)).trained;
}

/** Where a tag can be had as CSV. */
export function csvUrl(experiment, tag, range, hidden) {
  return "csv?" + query({ experiment, tag, ...range, hidden: [...hidden].join(",") });
}

async function getJson(route, parameters, signal) {
  const response = await fetch(`${route}?${query(parameters)}`, { signal, headers: { Accept: "application/json" } });
  if (response.ok) return response.json();
  const text = await response.text();
  let message = `${response.status} ${response.statusText}`;
  try {
    message = JSON.parse(text).error ?? message;
  } catch {
    // An error page of TensorBoard itself: its status says enough.
  }
  throw new Error(message);
}

function query(parameters) {
  const held = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null);
  return new URLSearchParams(held.map(([name, value]) => [name, String(value)])).toString();
}
