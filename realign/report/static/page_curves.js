"use strict";
/* Page "Curves": all metrics, smoothed, over steps or minutes, for one run, several runs or bands over seeds. */
(() => {
  const { el } = report;
  const state = { smoothing: 0.6, x: "step", filter: "", bands: true, more: false, log: false };
  const UNITS = [[/tokens_per_s/, "tokens/s"], [/_s$/, "seconds"], [/response_tokens|rollout_tokens/, "tokens"], [/entropy|kl|logprob/, "nats"],
    [/fraction|clip_/, "fraction"]];

  report.pages.curves = { title: "Curves", render: () => {
    const grid = el("div", { class: "charts" });
    const draw = () => { report.resetCharts(); report.put(grid, ...content()); report.drawAll(grid); };
    const seeds = report.seedGroups(report.shownRuns()).some((group) => group.length > 1);
    const zoom = el("button", { type: "button", onclick: () => report.zoom(null) }, "Reset zoom");
    const onzoom = () => zoom.toggleAttribute("disabled", !report.zoomRange());
    onzoom();
    document.addEventListener("zoomed", onzoom);
    const percent = el("output", {}, Math.round(state.smoothing * 100) + " %");
    const bar = el("div", { class: "toolbar", role: "group", "aria-label": "settings of the charts" },
      el("label", {}, "Smoothing ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, oninput: (event) => {
        state.smoothing = Number(event.target.value); percent.textContent = Math.round(state.smoothing * 100) + " %"; draw(); } }), percent),
      el("label", {}, "Axis ", el("select", { onchange: (event) => { state.x = event.target.value; report.zoom(null); draw(); } },
        ["step", "minutes"].map((name) => el("option", { value: name, selected: state.x === name }, name)))),
      el("label", {}, "Filter ", el("input", { type: "search", value: state.filter, placeholder: "kl, reward, time …", oninput: (event) => { state.filter = event.target.value; draw(); } })),
      el("label", { class: "check" }, el("input", { type: "checkbox", checked: state.log, onchange: (event) => { state.log = event.target.checked; draw(); } }), " Log axis (positive values)"),
      seeds && el("label", { class: "check" }, el("input", { type: "checkbox", checked: state.bands, onchange: (event) => { state.bands = event.target.checked; draw(); } }), " Band over seeds"),
      el("button", { type: "button", "aria-pressed": String(state.more), onclick: (event) => {
        state.more = !state.more; event.target.setAttribute("aria-pressed", String(state.more)); event.target.textContent = moreText(); draw(); } }, moreText()),
      zoom);
    const root = el("div", {}, bar, el("p", { class: "about screen" }, "Click a point to see the samples of its step. Drag over a chart to zoom all charts; double-click to reset. Faint lines are unsmoothed.", leftOut()), grid);
    root.ready = draw;
    return root;
  } };

  function leftOut() {
    const count = Math.max(...report.shownRuns().map((run) => run.metrics.left_out));
    return count ? " A run has " + report.plural(count, "more metric") + " than this page shows." : "";
  }

  function moreText() { return state.more ? "Main metrics only" : "Show all metrics"; }

  function xs(run) { return state.x === "step" ? run.metrics.step : run.metrics.seconds.map((s) => (s === null ? null : s / 60)); }

  function line(run, name, label, color, dash, exact) {
    const y = run.metrics.values[name];
    if (!y) return null;
    const x = xs(run), kept = x.map((value, i) => i).filter((i) => x[i] !== null);
    return { label, color, dash, exact, x: kept.map((i) => x[i]), y: kept.map((i) => y[i]) };
  }

  function banded(group, name, label, color, dash, exact) {
    const found = group.map((run) => line(run, name, "", color, dash)).filter(Boolean);
    if (!found.length) return null;
    const weight = exact ? 0 : state.smoothing;
    const by = new Map();
    for (const one of found) {
      const y = report.smooth(one.y, weight);
      one.x.forEach((x, i) => { if (report.isNumber(y[i])) by.set(x, [...(by.get(x) || []), y[i]]); });
    }
    const x = [...by.keys()].filter((key) => by.get(key).length === found.length).sort((a, b) => a - b);
    const all = x.map((key) => by.get(key));
    return { label: label + ", mean of " + found.length + " seeds", color, dash, x, y: all.map((v) => v.reduce((a, b) => a + b) / v.length),
      band: [all.map((v) => Math.min(...v)), all.map((v) => Math.max(...v))], exact: true };
  }

  function panels(runs) {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics.values)))];
    const left = new Set(names), found = [];
    for (const panel of runs.flatMap((run) => run.info.panels || [])) {
      const metrics = {};
      for (const [name, label] of Object.entries(panel.metrics)) {
        if (!left.has(name)) continue;
        metrics[name] = label;
        for (const held of names) {
          if (held.startsWith("eval/") && held.endsWith("/" + name) && left.has(held)) metrics[held] = "held out" + (held === "eval/" + name ? "" : ": " + held.slice(5, -name.length - 1));
        }
      }
      for (const name of Object.keys(metrics)) left.delete(name);
      if (Object.keys(metrics).length) found.push({ title: panel.title, metrics });
    }
    for (const name of left) {
      if (name.startsWith("eval/") && left.has(name.slice(5))) continue;
      const metrics = { [name]: name };
      if (left.has("eval/" + name)) metrics["eval/" + name] = "held out";
      found.push({ title: name, metrics, other: true });
    }
    return found;
  }

  function chartOf(panel, runs) {
    const names = Object.keys(panel.metrics), training = names.filter((n) => !n.startsWith("eval/")), single = runs.length === 1;
    const lines = [];
    const groups = state.bands ? report.seedGroups(runs) : runs.map((run) => [run]);
    const called = report.names(groups.map((group) => group[0]));
    names.forEach((name, j) => {
      const held = name.startsWith("eval/"), place = training.indexOf(name);
      const dash = held ? [5, 4] : !single && place > 0 ? [1.5, 3] : undefined;
      const about = held ? " · " + panel.metrics[name] : training.length > 1 ? " · " + panel.metrics[name] : "";
      groups.forEach((group, g) => {
        const label = single ? panel.metrics[name] : called[g] + about;
        const color = single ? report.palette(j) : report.colorOf(group[0]);
        lines.push(group.length > 1 ? banded(group, name, label, color, dash, held) : line(group[0], name, label, color, dash, held));
      });
    });
    const unit = (UNITS.find(([pattern]) => pattern.test(names[0])) || [])[1];
    const constant = lines.filter(Boolean).every((one) => { const v = one.y.filter(report.isNumber); return v.every((x) => x === v[0]); });
    if (report.isNoise(lines.filter(Boolean).flatMap((one) => one.y)) || (panel.other && constant)) return null;
    const all = lines.filter(Boolean);
    return report.chart({ title: panel.title, unit: panel.title.includes(unit || "(") || panel.title.includes("(") ? null : unit, lines: all, xLabel: state.x === "step" ? "step" : "minutes",
      smoothing: state.smoothing, zoomable: true, log: state.log, onpoint: state.x === "step" && report.focused().samples.length ? (step) => {
        location.hash = report.link("samples", null, { step: report.nearest(report.focused().samples, step) });
      } : null });
  }

  function content() {
    const runs = report.shownRuns(), text = state.filter.toLowerCase();
    const wanted = panels(runs).filter((panel) => !text || (panel.title + Object.keys(panel.metrics).join(" ")).toLowerCase().includes(text));
    const all = [["", wanted.filter((p) => !p.other)], ["Other metrics", wanted.filter((p) => p.other && !/^(time\/|step_s)/.test(p.title))],
      ["Time", wanted.filter((p) => p.other && /^(time\/|step_s)/.test(p.title))]];
    const parts = state.more || text ? all : all.slice(0, all[0][1].length ? 1 : 3);
    const found = parts.flatMap(([title, some]) => {
      const cards = some.map((panel) => chartOf(panel, runs)).filter(Boolean);
      return cards.length ? [title && el("h2", { class: "wide" }, title), ...cards].filter(Boolean) : [];
    });
    return found.length ? found : [report.empty(runs.some((r) => r.metrics.step.length) ? "No metric matches the filter." : "No metrics recorded yet.")];
  }
})();
