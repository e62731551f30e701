"use strict";
/* Recorded responses as a table to sort, filter and download, and the history of one prompt over the steps. */
(() => {
  const { el } = report;
  const PAGE = 100, CONDITION = /^([\w./@-]+?)(>=|<=|!=|=|>|<)(.+)$/;
  const state = { filter: "", by: "step", down: false, prompt: null, shown: PAGE };

  /* A record of plain values for each response of training and of the evaluations. */
  function rowsOf(run) {
    const groups = new Map(), rows = [];
    for (const [from, records] of [["training", run.samples], ["held out", run.eval_samples]]) {
      for (const r of records) {
        const key = [from, r.evaluation, r.step, r.id, r.episode].join("\n");
        groups.set(key, [...(groups.get(key) || []), r.reward].filter(report.isNumber));
        const advantage = from === "training" ? report.advantageOf(run, r, r) : null;
        rows.push({ key, values: { step: r.step, reward: r.reward, prompt: r.prompt, response: r.response, answer: r.answer, "vs. group": null, ...r.rewards,
          advantage, tokens: r.tokens, characters: r.response.length, from: r.evaluation ? from + ": " + r.evaluation : from, id: r.id } });
      }
    }
    for (const { key, values } of rows) {
      const rewards = groups.get(key);
      if (report.isNumber(values.reward) && rewards.length > 1) values["vs. group"] = values.reward - rewards.reduce((a, b) => a + b) / rewards.length;
    }
    return rows.map((row) => row.values);
  }

  /* Columns that some response has a value for. Tokens say more than characters. */
  function columnsOf(rows) {
    const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => rows.some((row) => row[name] !== null && row[name] !== undefined && row[name] !== ""));
    return names.filter((name) => name !== "characters" || !names.includes("tokens"));
  }

  /* `reward>0.5 step=3 carry`: conditions on columns, and words that the texts contain. */
  function matching(text) {
    const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      const [, name, sign, value] = CONDITION.exec(word) || [];
      return (row) => {
        const column = name && Object.keys(row).find((key) => key.toLowerCase().replace(/\W+/g, "") === name.replace(/\W+/g, ""));
        if (!column) return [row.id, row.prompt, row.answer, row.response].join(" ").toLowerCase().includes(word);
        const x = row[column], y = Number(value);
        if (x === null || x === undefined) return false;
        if (!report.isNumber(x) || Number.isNaN(y)) return (sign === "=" && String(x).toLowerCase() === value) || (sign === "!=" && String(x).toLowerCase() !== value);
        return { ">": x > y, "<": x < y, ">=": x >= y, "<=": x <= y, "=": x === y, "!=": x !== y }[sign];
      };
    });
    return (row) => tests.every((test) => test(row));
  }

  function sorted(rows) {
    const sign = state.down ? -1 : 1, known = (x) => x !== null && x !== undefined && x !== "";
    return [...rows].sort((a, b) => {
      const x = a[state.by], y = b[state.by];
      if (!known(x) || !known(y)) return known(y) - known(x);
      return sign * (report.isNumber(x) && report.isNumber(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    });
  }

  /* A text that a spreadsheet would run as a formula gets a quote in front. */
  function cell(x) {
    const text = x === null || x === undefined ? "" : String(x), formula = /^[=+\-@\t\r]/.test(text) && !report.isNumber(x) && Number.isNaN(Number(text));
    return '"' + (formula ? "'" : "") + text.replaceAll('"', '""') + '"';
  }

  function download(rows, columns, name) {
    const lines = [columns, ...rows.map((row) => columns.map((column) => row[column]))].map((line) => line.map(cell).join(","));
    const url = URL.createObjectURL(new Blob(["\ufeff" + lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    el("a", { href: url, download: name + ".csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /* Mean reward of one prompt over the steps. */
  function history(rows) {
    const lines = [...new Set(rows.map((row) => row.from))].map((from, i) => {
      const by = new Map();
      for (const row of rows) if (row.from === from && report.isNumber(row.reward)) by.set(row.step, [...(by.get(row.step) || []), row.reward]);
      const x = [...by.keys()].sort((a, b) => a - b);
      return { label: from, color: report.palette(i), x, y: x.map((step) => by.get(step).reduce((a, b) => a + b) / by.get(step).length), exact: true };
    });
    return report.chart({ title: "Mean reward of this prompt", lines, xLabel: "step", height: 160 });
  }

  report.samplesTable = (run, thinned) => {
    const rows = rowsOf(run), columns = columnsOf(rows);
    const body = el("div", {});
    const text = (name, row) => name === "prompt"
      ? el("button", { type: "button", class: "text", title: "history of this prompt", onclick: () => { state.prompt = row.prompt; draw(); } }, report.visible(row.prompt))
      : el("div", { class: "text", tabindex: "0" }, report.visible(row[name] ?? "–"));
    const draw = () => {
      report.resetCharts();
      const found = sorted(rows.filter(matching(state.filter)).filter((row) => state.prompt === null || row.prompt === state.prompt));
      const shown = found.slice(0, state.shown);
      const head = columns.map((name) => el("span", { class: shown.some((row) => report.isNumber(row[name])) ? "sortable number" : "sortable" }, el("button", { type: "button", "aria-label": "sort by " + name, "aria-pressed": String(state.by === name), onclick: () => {
        state.down = state.by === name ? !state.down : true; state.by = name; draw(); } }, name, state.by === name ? (state.down ? " ▾" : " ▴") : "")));
      const lines = shown.map((row) => el("tr", {}, columns.map((name) => ["prompt", "response", "answer"].includes(name)
        ? el("td", { class: "wrapped" }, text(name, row))
        : el("td", { class: typeof row[name] === "string" ? "nowrap" : "number" }, report.isNumber(row[name]) ? report.number(row[name]) : report.visible(row[name] ?? "–")))));
      report.put(body,
        state.prompt !== null && el("div", { class: "one" }, el("p", {}, el("button", { type: "button", onclick: () => { state.prompt = null; draw(); } }, "← All prompts"), " ",
          el("span", { class: "muted" }, "History of one prompt: its responses in all recorded steps.")), history(found)),
        el("p", { class: "about" }, report.plural(found.length, "response"), " · ",
          el("button", { type: "button", disabled: !found.length, onclick: () => download(found, columns, run.name + "-samples") }, "Download CSV")),
        found.length ? report.table(head, lines, { left: true, label: "responses", class: "samples" }) : report.empty("No response matches the filter."),
        found.length > shown.length && el("p", {}, el("button", { type: "button", onclick: () => { state.shown += 5 * PAGE; draw(); } }, "Show more (" + report.number(found.length - shown.length) + ")")));
      if (body.isConnected) report.drawAll(body);
    };
    draw();
    return el("div", {}, el("div", { class: "toolbar" }, el("label", { class: "long" }, "Filter ", el("input", { type: "search", value: state.filter,
      placeholder: "reward>0.5 step=3 from=training word", oninput: (event) => { state.filter = event.target.value; state.shown = PAGE; draw(); } }))), thinned, body);
  };
})();
