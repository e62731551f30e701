"use strict";
/* Page "Time": the dataflow graph with the time of its calls, the timeline of a step, time per step, staleness. */
(() => {
  const { el } = report;
  const state = { step: null };

  /* One color per call on the whole page: its place among the calls of the run by name. */
  function colorsOf(run) {
    const timed = Object.keys(run.metrics.values).filter((key) => /^time\/.+_s$/.test(key)).map((key) => key.slice(5, -2));
    const names = [...new Set([...timed, ...run.spans.map((s) => s.name)])].filter((name) => name !== "step").sort();
    return (name) => (name === "step" ? "var(--line-strong)" : report.palette(names.indexOf(name)));
  }

  report.pages.time = { title: "Time", render: () => {
    const run = report.focused();
    const calls = callTimes(run), color = colorsOf(run);
    const root = el("div", {},
      report.section("Dataflow graph", "Calls from left to right, with the mean time per step and the keys that they pass on. The bar is the fraction of the step.",
        report.graph(run.graph, Object.fromEntries(calls.map((c) => [c.name, c.mean])), mean(run.metrics.values.step_s), color) || report.empty("No graph recorded.")),
      breakdown(calls, color),
      timeline(run, color),
      el("div", { class: "charts" },
        report.chart({ title: "Seconds per step by call", zoomable: true, smoothing: 0.8, unit: "seconds", lines: [["step_s", "whole step"], ...calls.slice(0, 7).map((c) => [c.key, c.name])].map(([key, label], i) =>
          ({ label, color: i ? color(label) : report.isDark() ? "#a0a8b6" : "#5a616e", x: run.metrics.step, y: run.metrics.values[key] || [] })) }),
        report.chart({ title: "Throughput", zoomable: true, smoothing: 0.8, unit: "tokens/s", lines: [["rollout_tokens_per_s", "sampling"], ["train_tokens_per_s", "training"]].map(([key, label], i) =>
          ({ label, color: report.palette(i), x: run.metrics.step, y: run.metrics.values[key] || [] })) }),
        staleness(run)));
    root.ready = () => report.drawAll(root);
    return root;
  } };

  function mean(column) {
    const found = (column || []).filter(report.isNumber);
    return found.length ? found.reduce((a, b) => a + b) / found.length : 0;
  }

  /* Calls and phases with their mean seconds per step; time that occurs in some steps only counts per step. */
  function callTimes(run) {
    const steps = Math.max(1, run.metrics.step.filter((s) => s > 0).length);
    return Object.keys(run.metrics.values).filter((key) => /^time\/.+_s$/.test(key) && !/_wait_s$/.test(key)).map((key) => {
      const found = run.metrics.values[key].filter((x, i) => report.isNumber(x) && run.metrics.step[i] > 0);
      return { key, name: key.slice(5, -2), mean: found.reduce((a, b) => a + b, 0) / steps, times: found.length };
    }).filter((call) => call.mean > 0).sort((a, b) => b.mean - a.mean);
  }

  function breakdown(calls, color) {
    const total = calls.reduce((a, call) => a + call.mean, 0);
    if (!total) return null;
    return report.section("Mean time per step", "Calls can overlap with asynchronous rollout and with several processes.",
      el("div", { class: "stack", "aria-hidden": "true" }, calls.map((call) => el("i", { title: call.name, style: { width: 100 * call.mean / total + "%", background: color(call.name) } }))),
      report.table(["call", "mean per step", "fraction"], calls.map((call) => el("tr", {}, el("th", { scope: "row" },
        el("span", { class: "dot", style: { background: color(call.name) }, "aria-hidden": "true" }), call.name),
      el("td", { class: "number" }, report.duration(call.mean)), el("td", { class: "number" }, (100 * call.mean / total).toFixed(1) + " %"))), { label: "time of calls" }));
  }

  function timeline(run, color) {
    const steps = [...new Set(run.spans.map((s) => s.step))];
    if (!steps.length) return null;
    if (!steps.includes(state.step)) state.step = steps[Math.min(steps.length - 1, Math.floor(steps.length / 2))];
    const body = el("div", {});
    const show = () => report.put(body, gantt(run.spans.filter((s) => s.step === state.step), color));
    show();
    return report.section("Timeline of a step", "Each row is a thread. Calls that sample ahead of training start before the step.",
      el("div", { class: "toolbar" }, el("label", {}, "Step ", el("select", { onchange: (event) => { state.step = Number(event.target.value); show(); } },
        steps.map((step) => el("option", { value: step, selected: step === state.step }, step))))), body);
  }

  const MOST_ROWS = 40;

  function gantt(spans, color) {
    const start = Math.min(...spans.map((s) => s.start)), end = Math.max(...spans.map((s) => s.end)), width = end - start || 1;
    const names = [...new Set(spans.map((s) => s.name))];
    const lanes = lanesOf(spans), left = 150, scale = 1000, row = 26, height = lanes.length * row + 30;
    const x = (t) => left + scale * (t - start) / width;
    const chart = report.svg("svg", { viewBox: `0 0 ${left + scale + 16} ${height}`, class: "gantt", role: "img",
      "aria-label": "Timeline: " + spans.slice(0, 30).map((s) => s.name + " from " + report.duration(s.start - start) + " for " + report.duration(s.end - s.start)).join("; ") });
    for (let i = 0; i <= 5; i++) {
      const at = left + scale * i / 5;
      chart.append(report.svg("line", { x1: at, x2: at, y1: 4, y2: height - 22, class: "gridline" }),
        report.svg("text", { x: at, y: height - 6, class: "label", "text-anchor": i === 5 ? "end" : "middle" }, i ? report.duration(width * i / 5) : "0"));
    }
    lanes.slice(0, MOST_ROWS).forEach((lane, i) => {
      chart.append(report.svg("text", { x: 0, y: 20 + i * row, class: "label" }, lane.name));
      for (const span of lane.spans) {
        const from = x(span.start), w = Math.max(1.5, x(span.end) - from);
        chart.append(report.svg("g", {}, report.svg("title", {}, `${span.name} (${span.kind}): ${report.duration(span.end - span.start)}, starts at ${report.duration(span.start - start)}`),
          report.svg("rect", { x: from, y: 6 + i * row, width: w, height: row - 7, rx: 3, fill: color(span.name), class: span.name === "step" ? "whole" : "" }),
          w > 9 * span.name.length && report.svg("text", { x: from + 6, y: 20 + i * row, class: "inside" }, span.name)));
      }
    });
    return el("div", {}, el("div", { class: "scroll card", tabindex: "0", role: "region", "aria-label": "timeline" }, chart),
      lanes.length > MOST_ROWS ? report.empty("and " + (lanes.length - MOST_ROWS) + " more rows") : null,
      el("ul", { class: "legend" }, names.map((name) => el("li", {}, el("span", { class: "dot", style: { background: color(name) } }), name))));
  }

  /* Rows of the timeline: nested spans of a thread go to rows below; short-lived threads of rollouts share rows. */
  function lanesOf(spans) {
    const lanes = [];
    for (const span of [...spans].sort((a, b) => a.start - b.start || b.end - a.end)) {
      const thread = /^rollout/.test(span.thread) ? "rollout" : span.thread === "MainThread" ? "training" : span.thread;
      let lane = lanes.find((one) => one.thread === thread && one.end <= span.start + 1e-6);
      if (!lane) { lane = { thread, name: thread, spans: [], end: 0 }; lanes.push(lane); }
      lane.spans.push(span);
      lane.end = span.end;
    }
    const order = (lane) => (lane.thread === "training" ? 0 : 1);
    lanes.sort((a, b) => order(a) - order(b));
    lanes.forEach((lane, i) => { if (i && lanes[i - 1].thread === lane.thread) lane.name = ""; });
    return lanes;
  }

  function staleness(run) {
    const names = Object.keys(run.metrics.values).filter((name) => /version_lag|staleness/.test(name) && run.metrics.values[name].some(report.isNumber));
    const found = report.chart({ title: "Staleness (policy versions)", zoomable: true, smoothing: 0, lines: names.map((name, i) => ({ label: name, color: report.palette(i), x: run.metrics.step, y: run.metrics.values[name] })) });
    return found || el("div", { class: "card note" }, el("h3", {}, "Staleness"), el("p", { class: "about" }, "Rollout is synchronous: every response was sampled by the weights of its step."));
  }
})();
