// Every job of the bus on a row.

import { h, text, attr, Keyed } from "./dom.js";
import { group, holder, moment, span } from "./format.js";
import { Live } from "./live.js";

const WORST = { alarm: 0, look: 1, note: 2 };

export class Overview {
  constructor(main, frame) {
    this.rows = new Map();
    this.phases = [];
    this.at = performance.now();
    this.tiles = ["jobs", "engines serving", "recoveries under way", "jobs to look at"].map((name) => h("div", { class: "tile" }, h("b", { text: "–" }), h("span", { text: name })));
    this.filter = h("input", { type: "search", placeholder: "Find a job", "aria-label": "Find a job", oninput: () => this.draw() });
    this.only = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.worst = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.body = h("tbody");
    this.none = h("p", { class: "none", hidden: true });
    const head = ["Job", "Engines", "Weights and trainer", "Orchestrator", "To look at"];
    main.append(
      h("h1", { class: "sr", text: "All jobs" }),
      h("div", { class: "tiles" }, this.tiles),
      h("div", { class: "tools" }, this.filter,
        h("label", {}, this.only, " to look at only"),
        h("label", {}, this.worst, " worst first"),
        legend()),
      h("div", { class: "card" },
        h("table", { class: "jobs" },
          h("caption", { class: "sr", text: "Jobs" }),
          h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", text: name })))),
          this.body),
        this.none),
    );
    this.list = new Keyed(this.body, (row) => row.job, make, (node, row) => this.patch(node, row));
    this.live = new Live("api/live", {
      bus: (told) => frame.bus(told),
      jobs: (told) => { this.phases = told.phases; this.rows = new Map(told.rows.map((row) => [row.job, stamped(row)])); this.loaded = true; this.draw(); },
      changed: (told) => { for (const row of told.rows) this.rows.set(row.job, stamped(row)); for (const job of told.gone) this.rows.delete(job); this.draw(); },
    }, (state) => frame.link(state));
  }

  draw() {
    const rows = [...this.rows.values()].sort((a, b) => (a.job < b.job ? -1 : 1));
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = rows.filter((row) => row.job.includes(wanted) && (!this.only.checked || level(row) < 2));
    if (this.worst.checked) shown.sort((a, b) => level(a) - level(b) || b.concerns.length - a.concerns.length);
    this.list.update(shown);
    const sum = (read) => rows.reduce((all, row) => all + read(row), 0);
    const numbers = [rows.length, `${sum((row) => row.serving)} / ${sum((row) => row.engines)}`, sum((row) => row.recovering), rows.filter((row) => level(row) < 2).length];
    numbers.forEach((number, at) => text(this.tiles[at].firstElementChild, this.loaded ? number : "–"));
    attr(this.tiles[3], "data-level", numbers[3] ? "look" : "good");
    this.none.hidden = shown.length > 0 || !this.loaded;
    text(this.none, rows.length ? "No job is like that." : "No job is enrolled on this bus yet: `relight orchestrate --job NAME`, then `relight agent`.");
  }

  patch(node, row) {
    const [name, engines, trainer, orchestrator, look] = node.children;
    attr(node, "data-level", ["alarm", "look", "note", "good"][level(row)]);
    text(name.querySelector("a"), row.job);
    text(name.querySelector(".marks"), marks(row).join(" · "));
    strip(engines.querySelector(".strip"), row.strip, this.phases);
    text(engines.querySelector(".say"), row.error ? "" : `${row.serving} of ${row.engines} serve${row.serving < row.floor ? `, floor ${row.floor}` : ""}${row.recovering ? `, ${row.recovering} on the way back` : ""}`);
    text(trainer.firstElementChild, row.version ? `version ${row.version}` : "no version yet");
    text(trainer.lastElementChild, learner(row));
    text(orchestrator.firstElementChild, row.error ? "" : holder(row.holder));
    text(orchestrator.lastElementChild, row.epoch ? `epoch ${row.epoch}` : "");
    this.concern(look, row);
  }

  concern(cell, row) {
    const worst = row.concerns[0];
    const more = row.concerns.length - 1 + row.more_concerns;
    const said = row.error || (worst ? `${worst.of ? `${worst.of}: ` : ""}${worst.text}` : "");
    text(cell.firstElementChild, said);
    attr(cell.firstElementChild, "title", said);
    const since = worst && worst.for_s !== null ? `for ${span(worst.for_s + (performance.now() - row.at) / 1000)}` : "";
    const last = !worst && row.last_alarm ? `last alarm ${moment(row.last_alarm.time)}: ${row.last_alarm.detail}` : "";
    text(cell.lastElementChild, [since, more > 0 ? `and ${more} more` : "", last].filter(Boolean).join(", "));
  }

  tick() {
    for (const row of this.rows.values()) {
      const node = this.list.nodes.get(row.job);
      if (node && row.concerns.length) this.concern(node.lastElementChild, row);
    }
  }

  close() {
    this.live.close();
  }
}

function stamped(row) {
  return { ...row, at: performance.now() };
}

function level(row) {
  if (row.error) return 0;
  return row.concerns.length ? WORST[row.concerns[0].level] : 3;
}

function marks(row) {
  return [row.finished && "finished", row.hold && "on hold", row.mode !== "act" && row.mode].filter(Boolean);
}

function learner(row) {
  if (row.error) return "";
  if (!row.run) return "no trainer yet";
  if (row.trainer_silent) return `run ${row.run} is silent`;
  const at = row.boundary ? `step ${row.boundary.step}, ${row.boundary.phase}` : "no boundary open";
  return `run ${row.run}: ${at}${row.trainer_waits_for ? `; waits for ${row.trainer_waits_for}` : ""}`;
}

function make(row) {
  const two = (label) => h("td", { "data-label": label }, h("div"), h("div", { class: "sub" }));
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: `#/jobs/${encodeURIComponent(row.job)}` }), h("div", { class: "sub marks" })),
    h("td", {}, h("div", { class: "strip", role: "img" }), h("div", { class: "sub say" })),
    two("Weights"), two("Orchestrator"), two("To look at"));
}

// One cell an engine, coloured by its phase.
export function strip(node, letters, phases) {
  while (node.children.length > letters.length) node.lastElementChild.remove();
  while (node.children.length < letters.length) node.append(document.createElement("i"));
  const counts = {};
  [...letters].forEach((letter, at) => {
    const phase = phases[letter.charCodeAt(0) - 97] || "?";
    counts[phase] = (counts[phase] || 0) + 1;
    attr(node.children[at], "class", group(phase));
    attr(node.children[at], "title", phase);
  });
  attr(node, "data-many", letters.length > 40 ? "" : null);
  attr(node, "aria-label", Object.entries(counts).map(([phase, many]) => `${many} ${phase}`).join(", ") || "no engine");
}

export function legend() {
  const groups = { serving: "serving", back: "on its way back", lost: "lost", silent: "silent", draining: "draining", out: "taken out" };
  return h("ul", { class: "legend", "aria-label": "Colours of engines" }, Object.entries(groups).map(([name, said]) => h("li", {}, h("i", { class: name }), said)));
}
