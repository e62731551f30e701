"use strict";
/* The data of the report and the state of the page: shown runs, focused run, page, theme. */
(() => {
  const holder = document.getElementById("data");
  const store = {
    live: holder.dataset.live === "yes",
    runs: [],
    listed: [],
    hidden: new Set(),
    focus: 0,
    tags: {},
    listeners: [],
  };
  report.store = store;

  /* Light and dark values of the colors of runs; distinguishable with color vision deficiencies. */
  const COLORS = [["#2456c4", "#86adff"], ["#c2551d", "#ff9f66"], ["#1f7f5c", "#5fd3a4"], ["#8a3fb5", "#d49bf5"],
    ["#8a6d00", "#e6c34a"], ["#b82c66", "#ff8ab5"], ["#0b7a8f", "#58cfe6"], ["#5b6270", "#b4bccb"],
    ["#5f7d00", "#b6dd55"], ["#9c4a3c", "#f0a795"], ["#4a4fae", "#a9adff"], ["#7c5a8c", "#cdb0da"]];
  report.isDark = () => !matchMedia("print").matches &&
    (document.documentElement.dataset.theme === "dark" ||
     (document.documentElement.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches));
  report.palette = (i) => COLORS[i % COLORS.length][report.isDark() ? 1 : 0];
  report.colorOf = (run) => report.palette(store.runs.indexOf(run));
  report.shownRuns = () => store.runs.filter((run) => !store.hidden.has(run.key));
  report.focused = () => {
    const shown = report.shownRuns();
    return shown.includes(store.runs[store.focus]) ? store.runs[store.focus] : shown[0] || store.runs[0];
  };

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /* Load the embedded runs, or the list of runs and the selected ones from the server of `realign view`. */
  store.load = async () => {
    if (!store.live) { store.runs = await unpack(holder.textContent.trim()); return true; }
    let changed = false;
    const listed = await (await fetch("api/runs")).json();
    if (JSON.stringify(listed) !== JSON.stringify(store.listed)) { store.listed = listed; changed = true; }
    const wanted = selected();
    const runs = [];
    for (const key of wanted) {
      if (!listed.some((one) => one.key === key)) continue;
      const before = store.runs.find((run) => run.key === key);
      const tag = before ? store.tags[key] : ""; /* a run that was closed must be sent again */
      const answer = await fetch("api/run?key=" + encodeURIComponent(key), { headers: { "If-None-Match": tag } });
      if (answer.status === 304 && before) { runs.push(before); continue; }
      if (!answer.ok) continue;
      store.tags[key] = answer.headers.get("ETag") || "";
      runs.push(await answer.json());
      changed = true;
    }
    if (runs.map((r) => r.key).join("\n") !== store.runs.map((r) => r.key).join("\n")) changed = true;
    store.runs = runs;
    return changed;
  };

  /* The part after # is PAGE?run=KEY&run=KEY, so that a link leads to the same runs. */
  report.route = () => {
    const [page, query] = location.hash.slice(1).split("?");
    return { page, query: new URLSearchParams(query || "") };
  };
  function selected() { return report.route().query.getAll("run"); }
  /* view: what the page shows, such as {step: 7, id: "3@0"}, so that a copied address restores it. */
  report.link = (page, keys, view) => {
    const chosen = keys || (store.live ? store.runs.map((run) => run.key) : []);
    const pairs = [...chosen.map((key) => ["run", key]), ...Object.entries(view || {}).filter(([, x]) => x !== null && x !== undefined)];
    return "#" + page + (pairs.length ? "?" + pairs.map(([name, x]) => name + "=" + encodeURIComponent(x)).join("&") : "");
  };
  /* Write the view of the current page to the address, without a new entry in the history. */
  report.keep = (view) => {
    const { page, query } = report.route();
    for (const [name, x] of Object.entries(view)) x === null || x === undefined ? query.delete(name) : query.set(name, x);
    history.replaceState(null, "", "#" + page + (query.size ? "?" + query : ""));
  };

  report.remember = (name, value) => {
    try {
      if (value === undefined) return localStorage.getItem("realign." + name);
      localStorage.setItem("realign." + name, value);
    } catch { /* files without an origin have no storage */ }
    return value === undefined ? null : value;
  };
})();
