// The engines of one job, one a row, and as a strip of cells.

import { h, text, attr, Keyed } from "./dom.js";
import { group, span } from "./format.js";
import { legend } from "./overview.js";

const HEAD = ["Engine", "Phase", "Node", "Version", "Route", "Restarts", "Waits for"];

export class Engines {
  constructor(job) {
    this.job = job;
    this.body = h("tbody");
    this.strip = h("div", { class: "strip tall", role: "group", "aria-label": "Engines" });
    this.find = h("input", { type: "search", placeholder: "Find engine, node or version", "aria-label": "Find an engine", oninput: () => this.draw() });
    this.phase = h("select", { "aria-label": "Phase", onchange: () => this.draw() }, h("option", { value: "", text: "every phase" }), h("option", { value: "-", text: "all but SERVING" }));
    this.none = h("p", { class: "none", hidden: true });
    this.number = h("span", { class: "number" });
    this.node = h("section", { class: "card" },
      h("h2", { text: "Engines " }, this.number),
      h("div", { class: "tools" }, this.find, this.phase, legend()),
      this.strip,
      h("div", { class: "scroll" }, h("table", { class: "engines" },
        h("caption", { class: "sr", text: "Engines" }),
        h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col", text: name })))),
        this.body)),
      this.none);
    this.rows = new Keyed(this.body, (one) => one.engine, (one) => this.make(one), (node, one) => this.patch(node, one));
    this.cells = new Keyed(this.strip, (one) => one.engine, (one) => this.cell(one), (node, one) => {
      attr(node, "class", group(one.phase));
      attr(node, "title", `${one.engine}: ${one.phase}`);
      attr(node, "aria-label", `${one.engine}, ${one.phase}`);
    });
    this.engines = [];
    this.at = 0;
  }

  link(engine) {
    return `#/jobs/${encodeURIComponent(this.job)}/explain/${encodeURIComponent(engine)}`;
  }

  cell(one) {
    return h("a", { href: this.link(one.engine), tabindex: "-1" });
  }

  make(one) {
    return h("tr", {},
      h("th", { scope: "row" }, h("a", { href: this.link(one.engine), title: "What happened to it" })),
      h("td", {}, h("span", { class: "phase" }), h("span", { class: "sub since" })),
      ...HEAD.slice(2).map((label) => h("td", { "data-label": label })));
  }

  show(view, at) {
    this.view = view;
    this.engines = view.engines;
    this.at = at;
    for (const phase of new Set(this.engines.map((one) => one.phase))) {
      if (![...this.phase.options].some((option) => option.value === phase)) this.phase.append(h("option", { value: phase, text: phase }));
    }
    this.draw();
  }

  draw() {
    const wanted = this.find.value.trim().toLowerCase();
    const phase = this.phase.value;
    const shown = this.engines.filter((one) => (!phase || (phase === "-" ? one.phase !== "SERVING" : one.phase === phase))
      && `${one.engine} ${one.node} ${one.parts.join(" ")} ${one.version} ${one.route}`.toLowerCase().includes(wanted));
    this.cells.update(this.engines);
    attr(this.strip, "data-many", this.engines.length > 40 ? "" : null);
    this.rows.update(shown);
    text(this.number, shown.length === this.engines.length ? this.engines.length : `${shown.length} of ${this.engines.length}`);
    this.none.hidden = shown.length > 0;
    text(this.none, this.engines.length ? "No engine is like that." : "No agent has reported an engine yet.");
  }

  patch(node, one) {
    const [name, phase, host, version, route, restarts, waits] = node.children;
    const link = name.firstElementChild;
    text(link, `${one.engine}.${one.incarnation}`);
    attr(node, "data-group", group(one.phase));
    text(phase.firstElementChild, one.phase);
    attr(phase.firstElementChild, "class", `phase ${group(one.phase)}`);
    text(host, [one.node, ...one.parts].join(", "));
    text(version, one.version || "–");
    text(route, one.route ? one.route.replace(/^https?:\/\//, "") : one.suspected ? "suspected" : "–");
    text(restarts, `${one.restarts} / ${this.view.restarts_allowed}`);
    attr(restarts, "title", `in the last ${span(this.view.restart_window_s)}`);
    attr(restarts, "data-level", one.restarts >= this.view.restarts_allowed ? "alarm" : one.restarts > 1 ? "look" : null);
    this.moving(one, phase.lastElementChild, waits);
  }

  // What moves with time.
  moving(one, since, waits) {
    const age = (performance.now() - this.at) / 1000;
    text(since, one.since_s === null ? "" : span(one.since_s + age));
    const said = [];
    if (!one.approved) said.push("an approval");
    if (one.intent) {
      const left = one.intent.left_s === null ? "withheld" : one.intent.left_s - age < 0 ? `overdue by ${span(age - one.intent.left_s)}` : `${span(one.intent.left_s - age)} left`;
      said.push(`${one.intent.decision}, ${left}`);
    }
    if (one.backoff_s !== null && one.backoff_s > age) said.push(`its next start, in ${span(one.backoff_s - age)}`);
    if (one.why) said.push(one.recovery ? `recovery for ${span(one.for_s + age)}: ${one.why}` : one.why);
    if (one.left.length) said.push(`not proven gone: ${one.left.join(", ")}`);
    if (one.then !== "restart" && one.phase !== "RETIRED" && one.phase !== "STOPPED") said.push(`then ${one.then}`);
    text(waits, said.join("; ") || "–");
    attr(waits, "data-empty", said.length ? null : "");
    attr(waits, "title", [...said, one.intent ? one.intent.reason : ""].filter(Boolean).join("; ") || null);
  }

  tick() {
    for (const one of this.engines) {
      const node = this.rows.nodes.get(one.engine);
      if (node) this.moving(one, node.children[1].lastElementChild, node.children[6]);
    }
  }
}
