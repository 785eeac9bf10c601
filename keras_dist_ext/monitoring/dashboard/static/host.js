/**
 * Talk to TensorBoard, which shows this page in a frame.
 *
 * Messages go over a MessageChannel, as JSON: {type, id, payload, error, isReply}. TensorBoard says
 * "experimental.DataReloaded" when its reload button or interval has read new data. Dark mode is not among the
 * messages: TensorBoard marks its own body with the class "dark-mode", which a frame of the same origin can see.
 */

const VERSION = "experimental";
const URL_PREFIX = "p.replicas.";
const listeners = new Map();

if (window.parent !== window) {
  const channel = new MessageChannel();
  channel.port1.onmessage = ({ data }) => {
    let message;
    try {
      message = JSON.parse(data);
    } catch {
      return; // not of this protocol
    }
    const { type, id, isReply } = message;
    if (isReply) return;
    listeners.get(type)?.(message.payload);
    channel.port1.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
  };
  window.parent.postMessage(`${VERSION}.bootstrap`, "*", [channel.port2]);
}

/** Call back when TensorBoard has reloaded its data; in a window of its own, every 30 s while it is visible. */
export function onDataReloaded(callback) {
  listeners.set(`${VERSION}.DataReloaded`, callback);
  if (window.parent === window) {
    setInterval(() => document.visibilityState === "visible" && callback(), 30_000);
  }
}

/**
 * What TensorBoard's address says after #replicas&p.replicas.<name>=<value>&...: {name: value}.
 *
 * TensorBoard has a message for it ("GetURLPluginData"), which 2.21 answers with nothing.
 */
export function getUrlData() {
  try {
    const parts = window.parent.location.hash.split("&").map((part) => part.split("=").map(decodeURIComponent));
    return Object.fromEntries(
      parts
        .filter(([name]) => name.startsWith(URL_PREFIX))
        .map(([name, value]) => [name.slice(URL_PREFIX.length), value]),
    );
  } catch {
    return {}; // embedded by a page of another origin, or an address that nobody encoded
  }
}

/** Keep data-theme of this document ("light" or "dark") the same as TensorBoard's, and call back when it changes. */
export function followTheme(callback) {
  const root = document.documentElement;
  const set = (dark) => {
    const theme = dark ? "dark" : "light";
    if (root.dataset.theme !== theme) {
      root.dataset.theme = theme;
      callback(theme);
    }
  };
  let body = null;
  try {
    body = window.parent !== window ? window.parent.document.body : null;
  } catch {
    // Embedded by a page of another origin, such as a notebook: follow the system.
  }
  if (body) {
    const look = () => set(body.classList.contains("dark-mode"));
    new MutationObserver(look).observe(body, { attributes: true, attributeFilter: ["class"] });
    look();
  } else {
    const system = window.matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", () => set(system.matches));
    set(system.matches);
  }
}
