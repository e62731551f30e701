"use strict";
/* Page "Runs" of the viewer: the runs in the folder as a table to sort and filter, to open one or several. */
(() => {
  const { el } = report;
  report.pages = {};
  const chosen = new Set();
  const saved = (name, otherwise) => { try { return JSON.parse(report.remember(name)) ?? otherwise; } catch { return otherwise; } };
  const state = { filter: "", by: "started", down: true, columns: saved("columns", []), tags: saved("tags", {}) };

  report.pages.runs = { title: "Runs", live: true, render: () => {
    const listed = report.store.listed;
    if (!listed.length) return report.empty("No runs yet. The list updates when a run starts.");
    const open = el("a", { class: "button", href: report.link("overview", [...chosen]) });
    const update = () => {
      open.textContent = chosen.size ? "Open " + report.plural(chosen.size, "run") : "Select runs to compare";
      open.href = report.link("overview", [...chosen]);
      open.toggleAttribute("aria-disabled", !chosen.size);
    };
    const body = el("div", {});
    const draw = () => { report.put(body, table(listed, update, draw)); update(); };
    draw();
    const bar = el("div", { class: "toolbar" }, open,
      el("label", {}, "Filter ", el("input", { type: "search", value: state.filter, placeholder: "name, tag, lr=1e-5, running …", oninput: (event) => { state.filter = event.target.value; draw(); } })),
      el("label", {}, "Add column ", el("select", { onchange: (event) => { state.columns.push(event.target.value); event.target.value = ""; keep("columns"); draw(); } },
        el("option", { value: "" }, "…"), [["settings that differ", differing(listed)], ["metrics", metricsOf(listed)]].map(([label, names]) =>
          el("optgroup", { label }, names.filter((name) => !state.columns.includes(name)).map((name) => el("option", { value: name }, name)))))));
    return el("div", {}, report.section("Runs", "Open a run, or select several to compare them. The list updates every few seconds.", bar, body));
  } };

  function keep(name) { report.remember(name, JSON.stringify(state[name])); }
  function metricsOf(listed) { return [...new Set(listed.flatMap((run) => Object.keys(run.last || {})))].sort(); }
  function differing(listed) { return report.differing(listed.map((run) => ({ config: run.config || {} }))).filter((key) => !/^(name|output_dir)$/.test(key)).sort(); }
  function tagsOf(run) { return state.tags[run.key] || ""; }

  /* The value of a chosen column: a metric, else a setting. */
  function valueOf(run, name) {
    const metric = (run.last || {})[name];
    return metric === undefined ? (run.config || {})[name] : metric;
  }

  function table(listed, update, redraw) {
    const columns = [["run", (run) => run.key], ["status", (run) => run.status.state], ["step", (run) => run.step], ["duration", (run) => run.seconds],
      ["started", (run) => run.started], ["metric", (run) => last(run.curve)], ...state.columns.map((name) => [name, (run) => valueOf(run, name)]), ["tags", tagsOf]];
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.key, run.name, run.status.state, tagsOf(run), run.metric, ...Object.entries(run.config || {}).map(([key, x]) => key + "=" + x)].join(" ").toLowerCase();
    const key = (columns.find(([name]) => name === state.by) || columns[0])[1];
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === y) return 0;
      if (x === null || x === undefined || x === "") return 1;
      if (y === null || y === undefined || y === "") return -1;
      return (state.down ? -1 : 1) * (report.isNumber(x) && report.isNumber(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    };
    const runs = listed.filter((run) => words.every((word) => text(run).includes(word))).sort(order);
    const head = ["", ...columns.map(([name]) => el("span", { class: "sortable" },
      el("button", { type: "button", "aria-label": "sort by " + name, "aria-pressed": String(state.by === name), onclick: () => {
        state.down = state.by === name ? !state.down : true; state.by = name; redraw(); } }, name, state.by === name ? (state.down ? " ▾" : " ▴") : ""),
      state.columns.includes(name) && el("button", { type: "button", "aria-label": "remove column " + name, onclick: () => {
        state.columns = state.columns.filter((one) => one !== name); keep("columns"); redraw(); } }, "×"))), ""];
    const rows = branches(runs).map(({ run, parent, depth }) => el("tr", {},
      el("td", {}, el("input", { type: "checkbox", "aria-label": "select " + run.key, checked: chosen.has(run.key),
        onchange: (event) => { event.target.checked ? chosen.add(run.key) : chosen.delete(run.key); update(); } })),
      el("td", {}, el("span", { class: "muted" }, depth ? "\u00a0\u00a0".repeat(depth - 1) + "└ " : ""),
        el("a", { href: report.link("overview", [run.key]) }, report.visible(run.key)),
        parent ? [" ", el("a", { class: "muted", href: report.link("curves", [parent.key, run.key]) },
          "fork at step " + report.number(run.parent.step) + ": both curves")] : "",
        run.wrong ? el("div", { class: "alert small" }, "⚠ ", report.visible(run.wrong)) : null),
      el("td", {}, report.pill(run.status.state)),
      el("td", { class: "number" }, report.number(run.step) + (run.steps ? " / " + report.number(run.steps) : "")),
      el("td", { class: "number" }, report.duration(run.seconds)),
      el("td", { class: "nowrap" }, report.time(run.started).replace(" UTC", "")),
      el("td", { class: "nowrap" }, run.metric ? [el("span", { class: "muted" }, run.metric, " "), report.number(last(run.curve))] : "–"),
      state.columns.map((name) => { const x = valueOf(run, name); return el("td", { class: "number" }, report.isNumber(x) ? report.number(x) : report.visible(x ?? "–")); }),
      el("td", {}, el("input", { type: "text", class: "tags", "aria-label": "tags of " + run.key, value: tagsOf(run), placeholder: "+", onchange: (event) => {
        if (event.target.value.trim()) state.tags[run.key] = event.target.value.trim(); else delete state.tags[run.key];
        keep("tags"); } })),
      el("td", { class: "trend" }, report.sparkline(run.curve, report.palette(listed.indexOf(run))))));
    return runs.length ? report.table(head, rows, { left: true, label: "runs" }) : report.empty("No run matches the filter.");
  }

  /* Each run, and its forks below it. A run whose parent is not listed stands alone. */
  function branches(listed) {
    const byFolder = new Map(listed.map((run) => [run.folder, run])), byId = new Map(listed.map((run) => [run.id, run]));
    const parentOf = ({ folder, parent }) => {
      if (!parent.run) return undefined;
      // both may have been moved; runs of earlier versions have no id
      const beside = folder.replace(/[^/]*$/, "") + parent.run.split("/").pop();
      return [byFolder.get(parent.run), byFolder.get(beside), parent.id && byId.get(parent.id)]
        .find((run) => run && (!parent.id || !run.id || run.id === parent.id));
    };
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

  function last(column) { return column.filter(report.isNumber).pop(); }

  const MARKS = { completed: "✓", running: "●", stopped: "■", interrupted: "❚❚", failed: "✕", killed: "✕" };
  report.pill = (state) => el("span", { class: "pill " + (state in MARKS ? state : "unknown") },
    el("span", { "aria-hidden": "true" }, MARKS[state] || "?"), " ", state);
})();
