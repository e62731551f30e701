"use strict";
/* Page "Runs" of the viewer: the runs in the folder, to open one or several. */
(() => {
  const { el } = report;
  report.pages = {};
  const chosen = new Set();

  report.pages.runs = { title: "Runs", live: true, render: () => {
    const listed = report.store.listed;
    if (!listed.length) return report.empty("No runs yet. The list updates when a run starts.");
    const open = el("a", { class: "button", href: report.link("overview", [...chosen]) });
    const update = () => {
      open.textContent = chosen.size ? "Open " + report.plural(chosen.size, "run") : "Select runs to compare";
      open.href = report.link("overview", [...chosen]);
      open.toggleAttribute("aria-disabled", !chosen.size);
    };
    const rows = branches(listed).map(({ run, parent, depth }, i) => el("tr", {},
      el("td", {}, el("input", { type: "checkbox", "aria-label": "select " + run.key, checked: chosen.has(run.key),
        onchange: (event) => { event.target.checked ? chosen.add(run.key) : chosen.delete(run.key); update(); } })),
      el("td", {}, el("span", { class: "muted" }, depth ? "\u00a0\u00a0".repeat(depth - 1) + "└ " : ""),
        el("a", { href: report.link("overview", [run.key]) }, report.visible(run.key)),
        parent ? [" ", el("a", { class: "muted", href: report.link("curves", [parent.key, run.key]) },
          "fork at step " + report.number(run.parent.step) + ": both curves")] : ""),
      el("td", {}, report.pill(run.status.state)),
      el("td", { class: "number" }, report.number(run.step) + (run.steps ? " / " + report.number(run.steps) : "")),
      el("td", { class: "number" }, report.duration(run.seconds)),
      el("td", {}, report.time(run.started)),
      el("td", {}, run.metric ? [el("span", { class: "muted" }, run.metric, " "), last(run.curve)] : "–"),
      el("td", {}, report.sparkline(run.curve, report.palette(i)))));
    update();
    return el("div", {}, report.section("Runs", "Open a run, or select several to compare them. The list updates every few seconds.",
      el("p", {}, open),
      report.table(["", "run", "status", "step", "duration", "started", "metric", ""], rows, { left: true, label: "runs" })));
  } };

  /* Each run, and its forks below it. A run whose parent is not listed stands alone. */
  function branches(listed) {
    const known = new Map(listed.map((run) => [run.folder, run]));
    const parentOf = (run) => known.get(run.parent.run);
    const rows = [], seen = new Set();
    const add = (run, parent, depth) => {
      if (seen.has(run)) return;  // files of runs can name each other as parents
      seen.add(run);
      rows.push({ run, parent, depth });
      listed.filter((other) => parentOf(other) === run).forEach((other) => add(other, run, depth + 1));
    };
    listed.filter((run) => !parentOf(run)).forEach((run) => add(run, null, 0));
    listed.forEach((run) => add(run, null, 0));
    return rows;
  }

  function last(column) { const found = column.filter(report.isNumber); return report.number(found[found.length - 1]); }

  const MARKS = { completed: "✓", running: "●", stopped: "■", interrupted: "❚❚", failed: "✕", killed: "✕" };
  report.pill = (state) => el("span", { class: "pill " + (state in MARKS ? state : "unknown") },
    el("span", { "aria-hidden": "true" }, MARKS[state] || "?"), " ", state);
})();
