// The frame of the page: where one is, whether what is shown is live, and the colours.

import { h, text, attr } from "./dom.js";
import { span } from "./format.js";
import { Overview } from "./overview.js";
import { Job } from "./job.js";

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const pulse = document.getElementById("pulse");
const crumbs = document.getElementById("crumbs");

let page = null;
let bus = { away: false };
let busAt = 0;
let link = "connecting";
let linkSince = null;

const frame = {
  link(state) {
    if (state !== link) linkSince = state === "live" ? null : linkSince || Date.now();
    link = state;
    tick();
  },
  bus(told) {
    bus = told;
    busAt = performance.now();
    tick();
  },
};

function words() {
  if (page && page.missing) return page.missing;
  if (link === "lost" && linkSince) {
    return `The dashboard itself does not answer, since ${new Date(linkSince).toLocaleTimeString("en-GB")}. What you see is as of then; it is tried again.`;
  }
  if (bus.away) {
    const ago = bus.for_s + (performance.now() - busAt) / 1000;
    const since = new Date(Date.now() - ago * 1000).toLocaleTimeString("en-GB");
    return `Nothing new since ${since} (${span(ago)}): ${bus.reason.replace(/\.$/, "")}. What you see is as of then; engines serve on without the bus.`;
  }
  return "";
}

function tick() {
  const said = words();
  text(banner, said);
  banner.hidden = !said;
  document.body.classList.toggle("asof", Boolean(said));
  const state = said ? "away" : link;
  attr(pulse, "data-state", state);
  text(pulse.lastElementChild, { live: "live", away: "not live", lost: "connecting", paused: "paused" }[state] || state);
  if (page && !said) page.tick();
}

function route() {
  const parts = location.hash.startsWith("#/") ? location.hash.slice(2).split("/").map(decodeURIComponent) : [];
  const job = parts[0] === "jobs" ? parts[1] : undefined;
  if (!page || page.job !== job) {
    if (page) page.close();
    bus = { away: false };
    main.replaceChildren();
    page = job === undefined ? new Overview(main, frame) : new Job(main, frame, job);
    document.title = job === undefined ? "relight" : `${job} · relight`;
    crumbs.replaceChildren(...(job === undefined ? [] : [h("span", { "aria-hidden": "true", text: "/" }), h("span", { "aria-current": "page", text: job })]));
  }
  if (page.open) page.open(parts[2] === "explain" ? { engine: parts[3], recovery: parts[4] } : null);
}

const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const button = document.getElementById("theme");

function colours(theme) {
  attr(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  text(button, SIGNS[theme]);
  attr(button, "aria-label", `Colours: ${theme === "auto" ? "as the system has them" : theme}`);
  attr(button, "title", button.getAttribute("aria-label"));
}

function remembered() {
  const theme = localStorage.getItem("relight-theme");
  return THEMES.includes(theme) ? theme : "auto";
}

button.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(remembered()) + 1) % THEMES.length];
  localStorage.setItem("relight-theme", next);
  colours(next);
});
document.getElementById("skip").addEventListener("click", () => main.focus());
colours(remembered());
addEventListener("hashchange", route);
setInterval(tick, 1000);
route();
