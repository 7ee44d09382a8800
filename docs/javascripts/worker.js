// Search in pages opened from a disk: browsers refuse workers there, so an iframe of the page runs the worker's script.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.inside = new Promise((resolve) => {
        frame.onload = () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(frame.contentWindow);
        };
      });
      document.body.append(frame);
    }
    async postMessage(data) {
      (await this.inside).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
