// The search runs in a worker, and a browser starts none from the disk (file://). There this class
// takes the place of Worker: it runs the script in a hidden frame, which has the page's origin.
"use strict";
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      this.ready = new Promise((loaded) => (frame.onload = loaded));
      addEventListener("message", ({ source, data }) => {
        if (source === this.inside) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      const scripts = `<script>postMessage = (data) => parent.postMessage(data, "*")<\/script>
        <script src="${script}"><\/script>`;
      this.inside.document.open();
      this.inside.document.write(scripts);
      this.inside.document.close();
    }
    postMessage(data) {
      const message = () => new this.inside.MessageEvent("message", { data });
      this.ready.then(() => this.inside.dispatchEvent(message()));
    }
  };
