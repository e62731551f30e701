"use strict";
/* Page "System": CPU, memory and GPU use over time. */
(() => {
  const { el } = report;

  report.pages.system = { title: "System", render: () => {
    const runs = report.shownRuns().filter((run) => run.system.length);
    if (!runs.length) return report.empty("No system load recorded. Set records.system_seconds to the interval in seconds; the first sample follows after one interval.");
    const gpus = [...new Set(runs.flatMap((run) => run.system.flatMap((s) => Object.keys(s).map((key) => (/^gpu(\d+)_/.exec(key) || [])[1]).filter(Boolean))))];
    const chart = (title, unit, columns) => report.chart({ title, unit, xLabel: "min", lines: runs.flatMap((run, r) => columns.map(([key, label, dash], i) => {
      const found = run.system.filter((s) => report.isNumber(s[key])), start = run.system[0].time;
      return { label: runs.length > 1 ? run.key + " · " + label : label, color: report.palette(runs.length > 1 ? r : i), dash,
        x: found.map((s) => (s.time - start) / 60), y: found.map((s) => s[key]) };
    })) });
    const root = el("div", {}, el("div", { class: "charts" },
      chart("CPU", "busy cores", [["process_cpu", "this process"], ["machine_load", "load of the machine (1 min)"], ["cpu_cores", "cores", [3, 4]]]),
      chart("Memory", "GiB", [["process_memory_gib", "this process"], ["machine_memory_gib", "machine"], ["machine_memory_total_gib", "total", [3, 4]]]),
      gpus.length ? chart("GPU memory", "GiB", gpus.flatMap((i) => [[`gpu${i}_memory_gib`, `GPU ${i}`], [`gpu${i}_memory_total_gib`, `GPU ${i} total`, [3, 4]]])) : null,
      gpus.length ? chart("GPU utilization", "fraction", gpus.map((i) => [`gpu${i}_utilization`, `GPU ${i}`])) : null));
    if (!gpus.length) root.append(el("p", { class: "about" }, "No GPU was used."));
    root.ready = () => report.drawAll(root);
    return root;
  } };
})();
