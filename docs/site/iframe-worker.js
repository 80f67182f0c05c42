// A page of the file system may start no worker, and search runs in one. There it runs in a hidden frame, which
// may read a script that lies beside the page. Messages come later, as a worker's do. Over http nothing is changed.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      this.frame = frame
      const inside = frame.contentWindow
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }))
      this.ready = new Promise((done) => {
        const script = inside.document.createElement("script")
        script.src = new URL(address, document.baseURI).href
        script.onload = done
        script.onerror = () => this.onerror?.(new Event("error"))
        inside.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow?.onmessage({ data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
