/** What to show when there is nothing to show: the three lines to add to one's code. */
import { fill, h, icon } from "./dom.js";

const LINES = (logdir) => [
  "import keras_dist_ext as kde",
  "model = kde.Sequential([...])  # or kde.Model, or kde.adopt(model, strategy)",
  `model.fit(data, callbacks=[kde.ReplicaMonitor(${quote(logdir)})])`,
];

/** A Python string. */
const quote = (text) => JSON.stringify(text || "logs");

export function emptyView(logdir) {
  const code = LINES(logdir).join("\n");
  const button = h(
    "button",
    {
      type: "button",
      class: "icon-button copy",
      "aria-label": "Copy the three lines",
      onclick: async () => {
        const copied = await copy(code);
        fill(button, icon(copied ? "check" : "copy"), copied ? "Copied" : "Select and copy");
      },
    },
    icon("copy"),
    "Copy",
  );
  return h(
    "section",
    { class: "empty" },
    h("h2", {}, "No replicas here yet"),
    h(
      "p",
      {},
      "This tab shows what each replica of a distributed training run does: its loss, its throughput, and where its ",
      "time goes. TensorBoard found no run of ",
      h("code", {}, "keras_dist_ext"),
      logdir ? [" in ", h("code", { class: "logdir" }, logdir)] : null,
      ".",
    ),
    h("p", {}, "Add three lines to your code:"),
    h("div", { class: "code" }, h("pre", {}, h("code", {}, code)), button),
    h(
      "p",
      { class: "hint" },
      "Then train. The charts appear with TensorBoard’s next reload: the button at the top right, or its interval ",
      "in the settings.",
    ),
  );
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // without https or a permission there is no clipboard: the lines can be selected
  }
}
