// Numbers and phases in words.

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const s = Math.abs(seconds);
  const sign = seconds < 0 ? "−" : "";
  if (s < 10) return `${sign}${s.toFixed(1)} s`;
  if (s < 120) return `${sign}${Math.round(s)} s`;
  if (s < 7200) return `${sign}${Math.round(s / 60)} min`;
  if (s < 172800) return `${sign}${Math.round(s / 3600)} h`;
  return `${sign}${Math.round(s / 86400)} d`;
}

export function took(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms === 0) return "0";
  if (ms < 1) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return span(ms / 1000);
}

export function clock(ms) {
  if (!ms) return "";
  const at = new Date(ms);
  return at.toLocaleTimeString("en-GB", { hour12: false }) + "." + String(at.getMilliseconds()).padStart(3, "0");
}

export function moment(ms) {
  if (!ms) return "";
  const at = new Date(ms);
  const day = at.toDateString() === new Date().toDateString() ? "" : at.toLocaleDateString("en-CA") + " ";
  return day + at.toLocaleTimeString("en-GB", { hour12: false });
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

// How a phase is coloured: what serves, what is on its way back, what is lost, what is out.
const GROUPS = {
  SERVING: "serving",
  DRAINING: "draining",
  NEW: "back", STARTING: "back", STALE: "back", SYNCING: "back", VERIFYING: "back",
  STOPPING: "lost", BACKOFF: "lost", SILENT: "silent",
  STOPPED: "out", RETIRED: "out",
};

export function group(phase) {
  return GROUPS[phase] || "out";
}

export const STEPS = ["detect", "fence", "stop", "start", "boundary", "sync", "verify", "route"];

export function holder(name) {
  // host-PID-random: the host is what a person looks for
  return name ? name.replace(/-[0-9a-f]{8}$/, "") : "nobody";
}
