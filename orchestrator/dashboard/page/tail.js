// What is being said: facts and decisions in the order of the bus, the newest on top.

import { h, text, attr } from "./dom.js";
import { clock } from "./format.js";

const KEPT = 600;

export class Tail {
  constructor() {
    this.entries = [];
    this.list = h("ol", { class: "tail", tabindex: "0", "aria-label": "Facts and decisions, the newest first" });
    this.find = h("input", { type: "search", placeholder: "Find in what is said", "aria-label": "Find in what is said", oninput: () => this.again() });
    this.engine = choice("engine", () => this.again());
    this.type = choice("type", () => this.again());
    this.stop = h("button", { type: "button", class: "quiet", "aria-pressed": "false", text: "Pause", onclick: () => this.pause() });
    this.none = h("p", { class: "none", text: "Nothing was said yet." });
    this.held = 0;
    this.node = h("section", { class: "card said" },
      h("h2", { text: "Said on the bus" }),
      h("div", { class: "tools" }, this.find, this.engine, this.type, this.stop),
      this.none, this.list);
  }

  know(engines) {
    offer(this.engine, engines);
  }

  begin(entries) {
    this.entries = entries.slice(-KEPT);
    this.again();
  }

  add(entries, missed) {
    if (missed) this.entries.push({ gap: true });
    this.entries.push(...entries);
    this.entries.splice(0, this.entries.length - KEPT);
    if (this.paused) {
      this.held += entries.length;
      text(this.stop, `Go on (${this.held})`);
      return;
    }
    offer(this.type, entries.map((entry) => entry.type));
    const fresh = entries.filter((entry) => this.wanted(entry)).map((entry) => line(entry));
    if (missed) fresh.unshift(gap());
    this.list.prepend(...fresh.reverse());
    while (this.list.children.length > KEPT) this.list.lastElementChild.remove();
    this.none.hidden = this.list.children.length > 0;
  }

  again() {
    offer(this.type, this.entries.filter((entry) => !entry.gap).map((entry) => entry.type));
    const shown = this.entries.filter((entry) => entry.gap || this.wanted(entry));
    this.list.replaceChildren(...shown.map((entry) => (entry.gap ? gap() : line(entry))).reverse());
    this.none.hidden = shown.length > 0;
    text(this.none, this.entries.length ? "Nothing of that kind among the newest." : "Nothing was said yet.");
  }

  pause() {
    this.paused = !this.paused;
    attr(this.stop, "aria-pressed", String(this.paused));
    text(this.stop, this.paused ? "Go on" : "Pause");
    this.held = 0;
    if (!this.paused) this.again();
  }

  wanted(entry) {
    if (this.type.value && entry.type !== this.type.value) return false;
    if (this.engine.value && !about(entry, this.engine.value)) return false;
    const words = this.find.value.trim().toLowerCase();
    return !words || `${entry.type} ${entry.who} ${entry.of} ${entry.reason} ${entry.gist}`.toLowerCase().includes(words);
  }
}

function about(entry, engine) {
  const data = entry.data || {};
  return data.engine === engine
    || (Array.isArray(data.members) && data.members.some((member) => member[0] === engine))
    || (Array.isArray(data.loaded) && data.loaded.some((member) => member[0] === engine))
    || (Array.isArray(data.engines) && data.engines.some((report) => report.engine === engine));
}

export function line(entry, since) {
  const decided = entry.stream === "decisions";
  const when = typeof since === "number" ? `+${((entry.time - since) / 1000).toFixed(3)} s` : clock(entry.time);
  const node = h("li", { "data-type": entry.type, "data-stream": entry.stream },
    h("details", {},
      h("summary", {},
        h("time", { text: when }),
        h("b", { text: entry.type, class: decided ? "decided" : "told" }),
        h("span", { class: "of", text: entry.of || (decided ? "" : entry.who) }),
        h("span", { class: "why", text: words(entry) }))));
  const details = node.firstElementChild;
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) {
      details.append(h("div", { class: "sub", text: `${decided ? "decided by" : "said by"} ${entry.source}, entry ${entry.entry_id}` }),
        h("pre", { text: JSON.stringify(entry.data, null, 1) }));
    }
  });
  return node;
}

// What of it a line has room for: an alarm's detail, a decision's reason, what a fact says.
function words(entry) {
  const data = entry.data || {};
  return entry.type === "Alarm" ? `${data.kind}: ${data.detail}` : entry.reason || entry.gist;
}

function gap() {
  return h("li", { class: "gap", text: "some entries were trimmed unread" });
}

function choice(name, changed) {
  return h("select", { "aria-label": name, onchange: changed }, h("option", { value: "", text: `every ${name}` }));
}

function offer(select, values) {
  const known = new Set([...select.options].map((option) => option.value));
  const fresh = [...new Set(values)].filter((value) => !known.has(value));
  if (!fresh.length) return;
  const all = [...known, ...fresh].filter(Boolean).sort();
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...all.map((value) => h("option", { value, text: value })));
  select.value = chosen;
}
