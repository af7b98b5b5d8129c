// One engine's recovery step by step, as `relight explain` tells it, on a sheet over the page.

import { h, text, copier } from "./dom.js";
import { group, STEPS, took } from "./format.js";
import { line } from "./tail.js";

const sheet = document.getElementById("sheet");

export class Explain {
  constructor(base, job) {
    Object.assign(this, { base, job, what: null, seen: null });
    sheet.onclose = () => this.left();
    sheet.onclick = (event) => { if (event.target === sheet && event.clientX && event.clientX < sheet.getBoundingClientRect().left) sheet.close(); };
  }

  open(what, view) {
    this.what = what;
    this.seen = null;
    if (!what) {
      if (sheet.open) sheet.close();
      return;
    }
    sheet.replaceChildren(h("p", { class: "none", text: "Reading the streams…" }));
    if (!sheet.open) sheet.showModal();
    this.read(view);
  }

  left() {
    if (this.what) location.hash = `#/jobs/${encodeURIComponent(this.job)}`;
    this.what = null;
  }

  // A recovery under way is told anew when its engine has moved.
  stirred(view) {
    if (!this.what || this.what.recovery) return;
    const engine = view.engines.find((one) => one.engine === this.what.engine);
    const now = JSON.stringify([engine && engine.phase, engine && engine.incarnation, engine && engine.recovery, engine && engine.intent && engine.intent.id]);
    if (this.seen !== null && this.seen !== now) this.read(view);
    this.seen = now;
  }

  async read() {
    const what = this.what;
    const query = what.recovery ? `?recovery=${encodeURIComponent(what.recovery)}` : "";
    let told;
    try {
      const answer = await fetch(`${this.base}/explain/${encodeURIComponent(what.engine)}${query}`);
      told = await answer.json();
    } catch {
      told = { error: "The dashboard does not answer." };
    }
    if (this.what === what) this.draw(told);
  }

  draw(told) {
    const close = h("button", { type: "button", class: "quiet", "aria-label": "Close", text: "✕", onclick: () => sheet.close() });
    const head = h("header", {}, h("h2", { id: "sheet-title", text: this.what.engine }), close);
    if (told.error) {
      sheet.replaceChildren(head, h("p", { class: "none", text: told.error }));
      return;
    }
    head.insertBefore(h("span", { class: `phase ${group(told.phase)}`, text: told.phase }), close);
    const record = told.chain.find((entry) => entry.type === "RecoveryFinished");
    const parts = [head];
    if (!told.recovery) parts.push(h("p", { class: "none", text: "No recovery of it stands on the bus." }));
    else {
      const first = told.chain.find((entry) => entry.stream === "decisions");
      parts.push(h("p", {}, h("span", { class: "sub", text: `recovery ${told.recovery}, ${record ? record.data.outcome : "under way"}` }), h("br"), (record && record.reason) || (first && first.reason) || ""));
      if (record) parts.push(h("dl", { class: "phases" }, [...STEPS, "total"].filter((step) => record.data.phases[step] !== null && record.data.phases[step] !== undefined)
        .map((step) => h("div", {}, h("dt", {}, h("i", { class: `step-${step}` }), step), h("dd", { text: took(record.data.phases[step]) })))));
      const since = told.chain.length ? told.chain[0].time : 0;
      parts.push(h("ol", { class: "tail chain" }, told.chain.map((entry) => line(entry, since))));
    }
    const engine = this.what.engine;
    parts.push(h("details", { class: "how" }, h("summary", { text: "What you want done with it, say in a terminal" }),
      h("ul", {}, ["explain", "restart", "drain", "release", "retire"].map((verb) => h("li", {}, copier(`relight ${verb} ${engine} --job ${this.job}`))))));
    sheet.replaceChildren(...parts);
    text(document.getElementById("sheet-title"), engine);
  }
}
