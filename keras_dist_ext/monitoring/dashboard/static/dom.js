/**
 * Make elements. Text only ever becomes a text node: names of runs, devices and findings come from files that anyone
 * may have written, and nothing in this page parses HTML.
 */

const SVG = "http://www.w3.org/2000/svg";

/** h("button", {class: "x", onclick: f, "aria-label": "Close"}, "text", child, null) */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  append(element, children);
  return element;
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setProps(element, props);
  append(element, children);
  return element;
}

export function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const ICONS = {
  download: "M12 3v11m0 0 4-4m-4 4-4-4M4 17v3h16v-3",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.2h.01",
  reset: "M4 4v5h5M4.6 9A8 8 0 1 1 4 13",
  help: "M9.5 9a2.6 2.6 0 1 1 3.6 2.4c-.8.4-1.1.9-1.1 1.9M12 17h.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18",
  down: "m6 9 6 6 6-6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "m5 12 5 5L20 7",
  warning: "M12 4 2.5 20h19zM12 10v5M12 17.5h.01",
  info: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18M12 11v5M12 8h.01",
  diverge: "M12 20v-7m0 0L6 5m6 8 6-8M6 5h3.5M6 5v3.5M18 5h-3.5M18 5v3.5",
  slow: "M12 20a8 8 0 1 1 0-16 8 8 0 0 1 0 16M12 8v4l3 2",
};

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }),
  );
}

/** A row of buttons of which one is pressed. `options` is [[value, label, title], ...]. */
export function segmented(label, options, value, onchange) {
  const buttons = options.map(([option, text, title]) =>
    h(
      "button",
      {
        type: "button",
        "data-value": option,
        title,
        "aria-pressed": String(option === value),
        onclick: () => {
          set(option);
          onchange(option);
        },
      },
      text,
    ),
  );
  const set = (pressed) =>
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === pressed)));
  const element = h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
  return { element, set };
}

/** A button that is on or off. */
export function toggle(label, value, onchange, props = {}) {
  const button = h(
    "button",
    {
      type: "button",
      class: "toggle",
      "aria-pressed": String(value),
      ...props,
      onclick: () => {
        const pressed = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(pressed));
        onchange(pressed);
      },
    },
    label,
  );
  return { element: button, set: (pressed) => button.setAttribute("aria-pressed", String(pressed)) };
}

/** Say something to screen readers, and show nothing. */
export function announce(text) {
  let region = document.getElementById("announcer");
  if (!region) {
    region = h("div", { id: "announcer", class: "visually-hidden", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}
