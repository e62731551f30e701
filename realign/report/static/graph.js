"use strict";
/* Show the drawn dataflow graph: rebuild its SVG from a list of allowed elements, and add the time of each call. */
(() => {
  const ELEMENTS = new Set(["svg", "g", "rect", "path", "text", "title"]);
  const ATTRIBUTES = new Set(["width", "height", "viewBox", "transform", "x", "y", "rx", "d", "fill", "stroke",
    "stroke-width", "stroke-dasharray", "stroke-opacity", "font-size", "font-weight", "text-anchor"]);

  function copied(node) {
    if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
    if (node.nodeType !== Node.ELEMENT_NODE || !ELEMENTS.has(node.localName)) return null;
    const found = report.svg(node.localName, {});
    for (const { name, value } of node.attributes) if (ATTRIBUTES.has(name)) found.setAttribute(name, value);
    for (const child of node.childNodes) { const copy = copied(child); if (copy) found.append(copy); }
    return found;
  }

  /* A label on the upper right corner of a box. */
  function badge(right, top, text, stroke) {
    const width = text.length * 6.4 + 12;
    return [report.svg("rect", { class: "badge", x: right - width + 8, y: top - 10, width, height: 18, rx: 9, stroke, "stroke-width": 1 }),
      report.svg("text", { class: "took", x: right - width / 2 + 8, y: top + 3, "font-size": 11, "text-anchor": "middle" }, text)];
  }

  /* seconds: mean seconds per step of each call, by name. color: color of a call. */
  report.graph = (text, seconds, total, color) => {
    if (!text) return null;
    const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    if (parsed.localName !== "svg") return null;
    const root = copied(parsed);
    const calls = Object.entries(seconds).map(([name, s]) => name + " " + report.duration(s));
    root.setAttribute("role", "img");
    root.setAttribute("aria-label", "Dataflow graph. Mean time per step: " + calls.join(", "));
    if (report.isDark()) for (const rect of root.querySelectorAll("g rect")) {
      if (["#ffffff", "#f8fafc"].includes(rect.getAttribute("fill"))) continue;
      rect.setAttribute("fill", rect.getAttribute("stroke"));
      rect.setAttribute("fill-opacity", "0.24");
    }
    for (const box of root.querySelectorAll("g > g")) {
      const name = box.querySelector("text") && box.querySelector("text").textContent;
      const rect = box.querySelector("rect");
      if (!rect || !(name in seconds)) continue;
      const [x, y, w, h] = ["x", "y", "width", "height"].map((key) => Number(rect.getAttribute(key)));
      const share = total ? seconds[name] / total : 0;
      box.append(
        report.svg("rect", { class: "share", x: x + 6, y: y + h - 5, width: Math.max(1, (w - 12) * Math.min(1, share)),
          height: 3, rx: 1.5, fill: color(name) }),
        ...badge(x + w, y, report.duration(seconds[name]), color(name)));
    }
    const box = parsed.getAttribute("viewBox").split(" ").map(Number);
    root.setAttribute("viewBox", `0 0 ${box[2]} ${box[3]}`);
    root.setAttribute("width", box[2]);
    return report.el("div", { class: "graph scroll", tabindex: "0", role: "region", "aria-label": "dataflow graph" }, root);
  };
})();
