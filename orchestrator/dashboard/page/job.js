// One job: what it waits for, its engines, its recoveries, and what is being said.

import { h, text, attr, Keyed, copier } from "./dom.js";
import { count, holder, moment, span } from "./format.js";
import { Engines } from "./engines.js";
import { Explain } from "./explain.js";
import { Live } from "./live.js";
import { Recoveries } from "./recoveries.js";
import { Tail } from "./tail.js";

const TILES = ["Engines", "Weights", "Trainer", "Orchestrator"];

export class Job {
  constructor(main, frame, job) {
    this.job = job;
    this.base = `api/jobs/${encodeURIComponent(job)}`;
    this.view = null;
    this.at = 0;
    this.marks = h("span", { class: "marks" });
    this.tiles = TILES.map((name) => h("div", { class: "tile wide" }, h("span", { text: name }), h("b", { text: "–" }), h("div", { class: "sub" })));
    this.concerns = h("ul", { class: "concerns" });
    this.calm = h("p", { class: "none", text: "Nothing to look at." });
    this.nodes = h("tbody");
    this.alarms = h("ol", { class: "alarms" });
    this.quiet = h("p", { class: "none", text: "No alarm stands on the bus." });
    this.explain = new Explain(this.base, job);
    this.engines = new Engines(job);
    this.recoveries = new Recoveries(job);
    this.tail = new Tail();
    main.append(
      h("div", { class: "title" }, h("h1", { text: job }), this.marks),
      h("div", { class: "tiles" }, this.tiles),
      h("div", { class: "columns" },
        h("div", { class: "column" },
          section("To look at", this.concerns, this.calm),
          this.engines.node,
          this.recoveries.node,
          section("Nodes", h("table", { class: "nodes" },
            h("thead", {}, h("tr", {}, ["Node", "State", "Engines", "Spares", "Devices lost on"].map((name) => h("th", { scope: "col", text: name })))),
            this.nodes)),
          section("Alarms", this.alarms, this.quiet),
          this.how()),
        this.tail.node),
    );
    this.look = new Keyed(this.concerns, (one) => `${one.kind} ${one.of || ""} ${one.do || ""}`, makeConcern, (node, one) => this.concern(node, one));
    this.hosts = new Keyed(this.nodes, (one) => one.node, makeNode, (node, one) => this.host(node, one));
    this.told = new Keyed(this.alarms, (one) => one.entry, (one) => h("li", {}, h("time", { text: moment(one.time) }), h("b", { text: one.kind }), h("span", { text: one.detail, title: one.reason })), () => {});
    this.live = new Live(`${this.base}/live`, {
      bus: (told) => frame.bus(told),
      view: (view) => this.show(view),
      past: (past) => this.past(past),
      begin: (told) => this.tail.begin(told.entries),
      entries: (told) => this.tail.add(told.entries, told.missed),
    }, (state) => {
      frame.link(state);
      if (state === "lost" && !this.view) this.ask();
    });
  }

  // Why a job that never came does not: there may be none of that name.
  async ask() {
    const answer = await fetch(this.base).catch(() => null);
    this.missing = answer && answer.status === 404 ? `${(await answer.json()).error}; it is looked for again.` : "";
  }

  show(view) {
    this.view = view;
    this.missing = "";
    this.at = performance.now();
    text(this.marks, [view.finished && "finished", view.hold && "on hold", view.mode !== "act" && view.mode].filter(Boolean).join(" · "));
    const routed = view.engines.filter((engine) => engine.route).length;
    const recovering = view.engines.filter((engine) => engine.recovery).length;
    this.tile(0, `${view.serving} / ${view.engines.length} serve`, `${routed} routed, ${recovering} on the way back, floor ${view.floor}`, view.serving < view.floor ? "alarm" : null);
    this.tile(1, view.version || "none yet", view.published ? `published ${view.published}` : "nothing published");
    this.tile(2, view.run ? (view.trainer_silent ? `run ${view.run} is silent` : `run ${view.run}${view.boundary ? `, step ${view.boundary.step}` : ""}`) : "none yet", learner(view), view.trainer_silent ? "alarm" : null);
    const behind = view.behind ? `, ${count(view.behind, "fact")} behind` : "";
    this.tile(3, holder(view.holder), `epoch ${view.epoch}, commit ${view.commit}${behind}${view.parked ? `, ${view.parked} parked` : ""}`, view.holder ? null : "alarm");
    attr(this.tiles[3], "title", view.holder ? `${view.holder}; its lease is renewed each second` : null);
    this.calm.hidden = view.concerns.length > 0;
    text(this.calm, "Nothing to look at.");
    this.look.update(view.concerns);
    this.hosts.update(view.nodes);
    this.engines.show(view, this.at);
    this.recoveries.show(view, this.at);
    this.tail.know(view.engines.map((engine) => engine.engine));
    this.explain.stirred(view);
  }

  tile(at, big, small, level) {
    const [, first, second] = this.tiles[at].children;
    text(first, big);
    text(second, small);
    attr(second, "title", small);
    attr(this.tiles[at], "data-level", level);
  }

  concern(node, one) {
    attr(node, "data-level", one.level);
    text(node.querySelector("b"), one.of || one.kind);
    text(node.querySelector(".text"), one.text);
    text(node.querySelector(".sub"), one.for_s === null ? "" : `for ${span(one.for_s + this.age())}`);
  }

  host(node, one) {
    const [name, state, engines, spares, devices] = node.children;
    text(name, one.node);
    attr(node, "data-level", one.silent ? "alarm" : null);
    text(state, one.silent ? "silent" : one.asked_s !== null ? `asked, ${span(one.asked_s - this.age())} left` : one.reported ? "speaks" : "not heard under this epoch");
    text(engines, one.engines);
    text(spares, one.spares);
    text(devices, one.devices_lost_on.join(", ") || "–");
  }

  past(past) {
    this.recoveries.past(past);
    this.quiet.hidden = past.alarms.length > 0;
    this.told.update(past.alarms);
  }

  age() {
    return (performance.now() - this.at) / 1000;
  }

  tick() {
    if (!this.view) return;
    for (const one of this.view.concerns) {
      const node = this.look.nodes.get(this.look.key(one));
      if (node) this.concern(node, one);
    }
    for (const one of this.view.nodes) this.host(this.hosts.nodes.get(one.node), one);
    this.engines.tick();
    this.recoveries.tick();
  }

  open(what) {
    this.explain.open(what, this.view);
  }

  how() {
    const commands = [`relight status --job ${this.job}`, `relight events --job ${this.job} --follow`, `relight hold ${this.job}`, `relight release --job ${this.job}`, `relight restart --all --job ${this.job}`];
    return h("details", { class: "how" }, h("summary", { text: "What you want done, say in a terminal" }),
      h("p", { text: "This page changes nothing. With --bus or RELIGHT_BUS_URL set:" }),
      h("ul", {}, commands.map((command) => h("li", {}, copier(command)))));
  }

  close() {
    this.live.close();
    this.explain.open(null, null);
  }
}

export function section(name, ...children) {
  return h("section", { class: "card" }, h("h2", { text: name }), ...children);
}

function learner(view) {
  if (!view.run || view.trainer_silent) return "";
  const at = view.boundary;
  if (!at) return "no boundary open: it trains";
  const waits = view.trainer_waits_for ? `; waits for ${view.trainer_waits_for}` : "";
  return `boundary ${at.boundary} open (${at.phase}), exports ${at.exports || "nothing"}${waits}`;
}

function makeConcern(one) {
  return h("li", {}, h("b"), h("span", { class: "text" }), h("span", { class: "sub" }), one.do ? copier(one.do) : null);
}

function makeNode() {
  return h("tr", {}, h("th", { scope: "row" }), h("td", { "data-label": "State" }), h("td", { "data-label": "Engines" }), h("td", { "data-label": "Spares" }), h("td", { "data-label": "Devices lost on" }));
}
