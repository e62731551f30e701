"use strict";
/* Build DOM nodes. Text becomes text nodes only: nothing in the report parses a text of a model as HTML. */
window.report = {};
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  /* Control and format characters, such as those that reverse the direction of text. Newline and tab stay. */
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;

  function fill(node, props, children) {
    for (const [name, value] of Object.entries(props || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
      else if (name === "value" || name === "checked" || name === "open") node[name] = value;
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    append(node, children);
    return node;
  }

  function append(node, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }

  /* el("p", {class: "x", onclick: f}, "text", node, [more]) */
  report.el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
  report.svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);
  report.clear = (node) => { node.replaceChildren(); return node; };
  /* Replace the children of a node. */
  report.put = (node, ...children) => append(report.clear(node), children);

  /* Return the nodes of a text, with control and bidirectional characters as visible codes. */
  report.visible = (text) => {
    const nodes = [];
    let plain = "";
    for (const character of String(text)) {
      if (!HIDDEN.test(character)) { plain += character; continue; }
      if (plain) nodes.push(document.createTextNode(plain));
      plain = "";
      const code = "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(report.el("span", { class: "control", title: "control character " + code }, code));
    }
    if (plain) nodes.push(document.createTextNode(plain));
    return nodes;
  };

  report.table = (head, rows, props) => report.el("div", { class: "scroll", tabindex: "0", role: "region",
    "aria-label": (props && props.label) || "table" },
    report.el("table", { class: (props && props.class) || "" },
      report.el("thead", {}, report.el("tr", {}, head.map((cell, i) =>
        report.el("th", { scope: "col", class: i && !(props && props.left) ? "number" : "" }, cell)))),
      report.el("tbody", {}, rows)));

  report.section = (title, about, ...children) => report.el("section", { class: "block" },
    report.el("h2", {}, title), about && report.el("p", { class: "about" }, about), ...children);

  report.empty = (text) => report.el("p", { class: "empty" }, text);
})();
