/** The frame of a chart: title, what the cursor reads, controls, downloads, and what to say when there is no chart. */
import { fill, h, icon } from "../dom.js";
import { download, paintPng, textUrl } from "../download.js";

export class Card {
  /**
   * @param kind what the chart is, as in data-chart
   * @param controls elements that change what it shows
   * @param csv () => url or text, for the CSV button
   * @param png () => {canvases, legend}, for the PNG button
   * @param about {experiment, name}: what the file is called after
   */
  constructor({ kind, title, note, controls = [], csv, png, about }) {
    this.about = about;
    this.kind = kind;
    this.png = png;
    this.heading = h("h3", { id: `${about.id}-${kind}` }, title);
    this.readout = h("div", { class: "readout" });
    this.note = h("p", { class: "note" }, note);
    this.status = h("div", { class: "status", role: "status" });
    this.body = h("div", { class: "card-body" });
    this.footer = h("div", { class: "card-footer" });
    const button = (name, label, act) =>
      h(
        "button",
        {
          type: "button",
          class: "icon-button",
          title: label,
          "aria-label": `${label}: ${title}`,
          "data-action": name,
          onclick: act,
        },
        icon(name === "png" ? "image" : "download"),
        h("span", {}, name.toUpperCase()),
      );
    this.element = h(
      "section",
      {
        class: "card",
        "data-chart": kind,
        "data-experiment": about.experiment,
        "aria-labelledby": `${about.id}-${kind}`,
      },
      h(
        "header",
        { class: "card-header" },
        h("div", { class: "card-title" }, this.heading, note ? this.note : null),
        h(
          "div",
          { class: "card-controls" },
          controls,
          csv ? button("csv", "Download the data as CSV", () => this.saveCsv(csv())) : null,
          png ? button("png", "Download the chart as PNG", () => this.savePng()) : null,
        ),
      ),
      this.readout,
      this.body,
      this.status,
      this.footer,
    );
    this.setStatus("loading", "Loading …");
  }

  setTitle(title) {
    this.heading.textContent = title;
  }

  /** Say what is going on: kind is "", loading, empty or error. */
  setStatus(kind, text = "") {
    this.element.dataset.status = kind;
    fill(this.status, text);
  }

  saveCsv(source) {
    const name = `${this.about.file}-${this.kind}.csv`;
    if (source.url) download(source.url, name);
    else download(textUrl(source.text, "text/csv"), name);
  }

  /** The chart with its title and legend, as a canvas. */
  picture() {
    const { canvases, legend, caption } = this.png();
    const subtitle = [this.about.name, caption].filter(Boolean).join("  ·  ");
    return paintPng({ title: this.heading.textContent, subtitle, canvases, legend });
  }

  savePng() {
    download(this.picture().toDataURL(), `${this.about.file}-${this.kind}.png`);
  }
}
