// One stream of events from the dashboard; it comes back by itself. A page that nobody sees listens to nothing: a
// browser opens some six connections to one address, and pages that were left count too.

const HIDDEN_MS = 10000;

export class Live {
  constructor(url, handlers, tell) {
    Object.assign(this, { url, handlers, tell, source: null, timer: null, ended: false });
    this.seen = () => this.visible();
    this.leave = () => this.shut();
    document.addEventListener("visibilitychange", this.seen);
    addEventListener("pagehide", this.leave);
    addEventListener("pageshow", this.seen);
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    if (this.ended || this.source) return;
    this.source = new EventSource(this.url);
    for (const [name, handler] of Object.entries(this.handlers)) {
      this.source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    this.source.addEventListener("reload", () => this.again(500 + Math.random() * 1500));
    this.source.onopen = () => this.tell("live");
    this.source.onerror = () => {
      this.tell("lost");
      if (this.source && this.source.readyState === EventSource.CLOSED) this.again(3000);
    };
  }

  again(afterMs) {
    this.shut();
    this.timer = setTimeout(() => this.open(), afterMs);
  }

  visible() {
    clearTimeout(this.timer);
    if (!document.hidden) this.open();
    else this.timer = setTimeout(() => { this.shut(); this.tell("paused"); }, HIDDEN_MS);
  }

  shut() {
    if (this.source) this.source.close();
    this.source = null;
  }

  close() {
    this.ended = true;
    clearTimeout(this.timer);
    this.shut();
    document.removeEventListener("visibilitychange", this.seen);
    removeEventListener("pagehide", this.leave);
    removeEventListener("pageshow", this.seen);
  }
}
