/**
 * Turn what the server sends into columns to draw.
 *
 * In a line, a number is a point, null a gap (the line is broken there), and undefined a place that the line passes
 * without a point of its own: TensorBoard keeps other steps of each series once it samples.
 */

/** The axis position of steps and walls: [[steps, walls], axis, start] -> positions. */
export function positions(steps, walls, axis, start) {
  if (axis === "step") return steps;
  return axis === "wall" ? walls : walls.map((wall) => wall - start);
}

/** The bins of a response, on an axis: {first, last}, positions of their first and last step. */
export function binsOf(response, axis) {
  const first = positions(response.steps, response.walls, axis, response.start);
  if (response.exact) return { first, last: first };
  return { first, last: positions(response.ends, response.wall_ends, axis, response.start) };
}

/** A line of a response, with an entry for each bin: {low, mean, high, bad}. */
export function expand(line, count) {
  const whole = (values) => {
    if (!line.at) return values;
    const spread = new Array(count).fill(undefined);
    line.at.forEach((bin, i) => (spread[bin] = values[i]));
    return widenGaps(spread);
  };
  const mean = whole(line.values ?? line.mean);
  const [low, high] = line.values ? [mean, mean] : [whole(line.min), whole(line.max)];
  return { low, mean, high, bad: new Map(line.bad ?? []) };
}

/** Make all of a stretch without numbers a gap if any of it is one. */
function widenGaps(values) {
  for (let i = 0; i < values.length; i++) {
    if (typeof values[i] === "number") continue;
    let end = i;
    let isGap = false;
    while (end < values.length && typeof values[end] !== "number") isGap ||= values[end++] === null;
    if (isGap) values.fill(null, i, end);
    i = end;
  }
  return values;
}

/** Two places for each bin of more than one step, so that it shows its lowest and its highest value. */
export function pairedX({ first, last }) {
  const x = [];
  first.forEach((position, bin) => {
    x.push(position);
    if (last[bin] > position) x.push(last[bin]);
  });
  return x;
}

/** The values of a line at the places of `pairedX`: lowest and highest, in the order in which the line moves. */
export function pairedY({ first, last }, line) {
  const y = [];
  for (let bin = 0; bin < first.length; bin++) {
    if (!(last[bin] > first[bin])) {
      y.push(line.mean[bin]);
      continue;
    }
    const rises = (line.mean[bin + 1] ?? line.mean[bin]) >= (line.mean[bin - 1] ?? line.mean[bin]);
    if (rises) y.push(line.low[bin], line.high[bin]);
    else y.push(line.high[bin], line.low[bin]);
  }
  return y;
}

/** The same value at both places of a bin. */
export function repeatedY({ first, last }, values) {
  const y = [];
  for (let bin = 0; bin < first.length; bin++) {
    y.push(values[bin]);
    if (last[bin] > first[bin]) y.push(values[bin]);
  }
  return y;
}

/** One place a bin: its middle. */
export const middleX = ({ first, last }) => first.map((position, bin) => (position + last[bin]) / 2);

/** TensorBoard's smoothing: an exponential moving average, corrected for its start. Gaps stay. */
export function smooth(values, weight) {
  if (!weight) return values;
  let last = 0;
  let power = 1;
  return values.map((value) => {
    if (typeof value !== "number") return value;
    last = last * weight + (1 - weight) * value;
    power *= weight;
    return last / (1 - power);
  });
}

/** Give places that a line passes the value before them; before its first and after its last point it has none. */
export function carry(values) {
  const last = values.findLastIndex((value) => value !== undefined);
  let held;
  return values.map((value, i) => (i > last ? undefined : (held = value === undefined ? held : value)));
}

/** Running sums over lines: what areas on top of each other go up to. A gap adds nothing. */
export function stack(lines, count) {
  const total = new Array(count).fill(0);
  return lines.map((values) => carry(values).map((value, bin) => (total[bin] += value ?? 0)));
}

/** Numbers above zero, for a log scale; what is not becomes a gap. */
export const positive = (values) => values.map((value) => (typeof value === "number" && value <= 0 ? null : value));
