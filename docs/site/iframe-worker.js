// Browsers start no worker for a page that is a file. The search of the site is a worker: here it runs in a hidden
// frame, with the three functions of a worker that it calls.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.url = new URL(url, document.baseURI).href;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve, reject) => {
        const start = () => {
          const inner = this.frame.contentWindow;
          const load = (source) => new Promise((loaded, failed) => {
            const script = inner.document.createElement("script");
            script.src = source;
            script.onload = loaded;
            script.onerror = failed;
            inner.document.head.append(script);
          });
          inner.importScripts = (...sources) => sources.reduce((last, s) => last.then(() => load(s)), Promise.resolve());
          inner.postMessage = (data) => this.answer(data);
          load(this.url).then(() => resolve(inner), reject);
        };
        const attach = () => { document.body.append(this.frame); start(); };
        if (document.body) attach(); else addEventListener("DOMContentLoaded", attach);
      });
    }
    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.ready.then((inner) => {
        const event = new inner.MessageEvent("message", { data });
        inner.dispatchEvent(event);
      });
    }
    terminate() { this.frame.remove(); }
  };
}
