// Recoveries under way and past, each as a bar of its phases on one scale.

import { h, text, attr, Keyed } from "./dom.js";
import { moment, span, STEPS, took } from "./format.js";

export class Recoveries {
  constructor(job) {
    this.job = job;
    this.body = h("ol", { class: "recoveries" });
    this.scale = h("div", { class: "scale", "aria-hidden": "true" });
    this.none = h("p", { class: "none", text: "No engine was lost yet, as far as the bus remembers." });
    this.number = h("span", { class: "number" });
    this.own = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.node = h("section", { class: "card" },
      h("h2", { text: "Recoveries " }, this.number),
      h("div", { class: "tools" },
        h("label", {}, this.own, " each to its own width"),
        h("ul", { class: "legend", "aria-label": "Colours of phases" }, STEPS.map((step) => h("li", {}, h("i", { class: `step-${step}` }), step)))),
      this.scale, h("div", { class: "scroll" }, this.body), this.none);
    this.bars = new Keyed(this.body, (one) => one.key, (one) => this.make(one), (node, one) => this.patch(node, one));
    this.running = [];
    this.ended = [];
    this.at = 0;
  }

  show(view, at) {
    this.at = at;
    this.running = view.engines.filter((one) => one.recovery).map((one) => ({
      key: one.recovery, id: one.recovery, engine: one.engine, lost: lost(one), outcome: one.approved ? "under way" : "waits for approval",
      why: one.why, phases: one.passed, for_s: one.for_s, next: next(one),
    }));
    this.draw();
  }

  past(past) {
    this.ended = past.recoveries.map((one) => ({
      key: one.entry, id: one.id, engine: one.engine, lost: (/^(.*?) was lost/.exec(one.why) || [0, `${one.engine}.${one.incarnation}`])[1],
      outcome: one.outcome, why: one.why.replace(/^.*? was lost: /, ""), phases: one.phases, time: one.time,
    }));
    const words = Object.entries(past.outcomes).sort().map(([outcome, many]) => `${many} ${outcome}`);
    text(this.number, words.join(", "));
    this.draw();
  }

  draw() {
    const all = [...this.running, ...this.ended];
    this.longest = Math.max(1, ...all.map((one) => this.length(one)));
    this.none.hidden = all.length > 0;
    this.scale.hidden = all.length === 0 || this.own.checked;
    const marks = [0, 0.25, 0.5, 0.75, 1];
    if (!this.scale.children.length) this.scale.append(...marks.map(() => h("span")));
    marks.forEach((part, at) => text(this.scale.children[at], took(Math.round(part * this.longest))));
    this.bars.update(all);
  }

  length(one) {
    const spent = STEPS.reduce((sum, step) => sum + (one.phases[step] || 0), 0);
    return one.for_s === undefined ? spent : Math.max(spent, (one.for_s + (performance.now() - this.at) / 1000) * 1000 + (one.phases.detect || 0));
  }

  make(one) {
    const href = `#/jobs/${encodeURIComponent(this.job)}/explain/${encodeURIComponent(one.engine)}${one.id ? `/${encodeURIComponent(one.id)}` : ""}`;
    return h("li", {},
      h("a", { href, title: "Step by step" }, h("b", { text: one.lost }), h("span", { class: "outcome" })),
      h("div", { class: "bar" }, STEPS.map((step) => h("i", { class: `step-${step}` })), h("i", { class: "waiting" })),
      h("span", { class: "total" }), h("span", { class: "sub why" }));
  }

  patch(node, one) {
    const [link, bar, total, why] = node.children;
    text(link.lastElementChild, one.outcome);
    attr(link.lastElementChild, "data-outcome", one.outcome);
    const length = this.length(one);
    const whole = this.own.checked ? length : this.longest;
    STEPS.forEach((step, at) => wide(bar.children[at], one.phases[step], whole, `${step} ${took(one.phases[step])}`));
    const spent = STEPS.reduce((sum, step) => sum + (one.phases[step] || 0), 0);
    wide(bar.lastElementChild, one.for_s === undefined ? null : length - spent, whole, one.next);
    attr(bar, "aria-label", STEPS.filter((step) => one.phases[step] !== null).map((step) => `${step} ${took(one.phases[step])}`).join(", "));
    attr(bar, "role", "img");
    text(total, one.for_s === undefined ? took(one.phases.total) : span(length / 1000));
    text(why, `${one.time ? `${moment(one.time)}  ` : ""}${one.why}${one.next ? `; ${one.next}` : ""}`);
    attr(why, "title", one.why);
  }

  tick() {
    if (this.running.length) this.draw();
  }
}

function wide(node, ms, whole, title) {
  const part = ms ? Math.min(100, (100 * ms) / whole) : 0;
  node.style.width = `${part}%`;
  node.style.minWidth = ms ? "2px" : "0";
  attr(node, "title", title);
}

// The incarnation that a recovery (ENGINE.INCARNATION-EPOCH-SERIAL) is of.
function lost(one) {
  const rest = one.recovery.startsWith(`${one.engine}.`) ? one.recovery.slice(one.engine.length + 1) : "";
  return rest ? `${one.engine}.${rest.split("-")[0]}` : one.engine;
}

function next(one) {
  if (!one.approved) return "waits for an approval";
  return one.intent ? `now ${one.intent.decision}` : one.backoff_s ? "waits before its next start" : `now ${one.phase}`;
}

