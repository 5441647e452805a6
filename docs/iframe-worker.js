// The search runs in a Worker, which browsers refuse to a page that was opened from the disk. There, a hidden frame takes
// its place: it loads the same script, and messages are passed as events.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const deliver = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = (data) => deliver(this, data);
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => load(one)));
      const load = (one) =>
        new Promise((done, failed) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, { src: one, onload: done, onerror: failed });
          frame.contentDocument.body.append(script);
        });
      const ready = load(new URL(url, location.href).href);
      this.postMessage = (data) => ready.then(() => deliver(inside, data));
    }
  };
  window.Worker = window.IFrameWorker;
}
