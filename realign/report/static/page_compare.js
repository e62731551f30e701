"use strict";
/* Page "Compare": final and best values of several runs, and the settings in which they differ. */
(() => {
  const { el } = report;
  const state = { filter: "" };

  report.pages.compare = { title: "Compare", several: true, render: () => {
    const runs = report.shownRuns();
    const body = el("div", {});
    const draw = () => report.put(body, metrics(runs));
    draw();
    return el("div", {}, report.section("Metrics", "Last values, and the best where larger or smaller is known to be better. The best run is highlighted.",
      el("div", { class: "toolbar" }, el("label", {}, "Filter ", el("input", { type: "search", value: state.filter, placeholder: "own, kl, time …", oninput: (event) => { state.filter = event.target.value; draw(); } }))),
      body), report.differences(runs));
  } };

  /* All metrics whose names the filter matches, the headline first. */
  function metrics(runs) {
    const names = [...new Set([...runs.flatMap(report.headline), ...runs.flatMap((run) => Object.keys(run.metrics.values))])]
      .filter((name) => name.includes(state.filter.trim()) && runs.some((run) => report.course(run, name) && !report.isNoise(run.metrics.values[name])));
    const rows = names.map((name) => {
      const found = runs.map((run) => report.course(run, name)), larger = report.larger(runs[0], name);
      const lasts = found.map((c) => (c ? (c.best && larger !== null ? c.best[1] : c.last[1]) : null));
      const known = lasts.filter(report.isNumber);
      const best = larger === null || known.length < 2 ? null : (larger ? Math.max : Math.min)(...known);
      return el("tr", {}, el("th", { scope: "row" }, name), found.map((course, i) => el("td", { class: "number" + (best !== null && lasts[i] === best ? " best" : "") },
        course ? [report.number(course.last[1]), course.best && el("small", {}, " best ", report.number(course.best[1]), " at ", report.number(course.best[0]))] : "–")));
    });
    const facts = [["folder", (run) => report.visible(run.key)], ["status", (run) => report.pill(run.status.state)], ["steps", (run) => report.number(run.metrics.step[run.metrics.step.length - 1])],
      ["duration", (run) => report.duration(run.metrics.seconds[run.metrics.seconds.length - 1])], ["warnings", (run) => report.number(run.warnings.length)],
      ["commit", (run) => (run.info.git ? run.info.git.commit.slice(0, 8) : "–")]]
      .map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), runs.map((run) => el("td", { class: "number" }, value(run)))));
    const head = ["", ...report.names(runs).map((name, i) => [report.dot(runs[i]), report.visible(name)])];
    return report.table(head, [...facts, ...rows], { label: "comparison of runs" });
  }
})();
