"use strict";
/* The frame of the report: header, pages, theme, keyboard, and updates of the viewer. */
(() => {
  const { el, store } = report;
  const main = document.getElementById("main"), header = document.getElementById("header");
  const POLL_MS = 4000;
  let shown = null, stale = false; /* stale: new data waits until no control of the page has the focus */

  function pages() {
    return Object.entries(report.pages).filter(([, page]) => (page.live ? store.live : store.runs.length > 0) && (!page.several || store.runs.length > 1));
  }

  function current() {
    const found = pages(), { page } = report.route();
    return (found.find(([name]) => name === page) || (store.live ? found[0] : found.find(([, p]) => !p.live)) || [null])[0];
  }

  function setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  function frame() {
    const name = current();
    const theme = report.remember("theme") || "auto";
    const multiple = store.runs.length > 1, names = report.names(store.runs);
    report.put(header, 
      el("div", { class: "brand" }, el("span", { class: "mark", "aria-hidden": "true" }), el("strong", {}, "realign"),
        store.runs.length === 1 && el("span", { class: "title" }, report.visible(store.runs[0].name)),
        store.runs.length === 1 && report.pill(store.runs[0].status.state),
        el("span", { class: "grow" }),
        el("label", { class: "theme" }, el("span", { class: "hidden" }, "Theme"), el("select", { onchange: (event) => {
          report.remember("theme", event.target.value); setTheme(event.target.value); render(true); } },
        ["auto", "light", "dark"].map((one) => el("option", { value: one, selected: one === theme }, one === "auto" ? "system theme" : one))))),
      multiple && el("div", { class: "runs", role: "group", "aria-label": "shown runs" }, store.runs.map((run, i) => el("label", { class: "chip", title: run.key, style: { "--run": report.colorOf(run) } },
        el("input", { type: "checkbox", checked: !store.hidden.has(run.key), onchange: (event) => {
          event.target.checked ? store.hidden.delete(run.key) : store.hidden.add(run.key);
          if (store.hidden.size === store.runs.length) store.hidden.delete(run.key);
          render(true);
        } }), el("span", { class: "dot" }), report.visible(names[i]))),
      ["samples", "tokens", "time", "overview"].includes(name) && el("label", { class: "focus" }, "Details of ", el("select", { onchange: (event) => { store.focus = Number(event.target.value); render(true); } },
        store.runs.map((run, i) => el("option", { value: i, selected: run === report.focused() }, names[i]))))),
      el("nav", { "aria-label": "pages" }, pages().map(([key, page]) => el("a", { href: report.link(key), "aria-current": key === name ? "page" : null }, page.title))));
  }

  function render(keepScroll) {
    const name = current(), top = scrollY;
    shown = name;
    report.resetCharts();
    frame();
    report.clear(main);
    if (!name) { main.append(report.empty("No runs.")); return; }
    const page = report.pages[name];
    const content = page.render();
    main.append(el("h1", { class: "hidden" }, page.title), content);
    if (content.ready) content.ready();
    document.title = (store.runs.length === 1 ? store.runs[0].name + " · " : "") + page.title + " · realign";
    if (keepScroll) scrollTo(0, top);
  }

  function notice(text) {
    const bar = document.getElementById("notice");
    if (bar.textContent !== text) bar.textContent = text;
  }

  async function update() {
    try {
      stale = await store.load() || stale;
      const focused = document.activeElement;
      if (stale && (focused === main || !main.contains(focused))) { stale = false; render(true); }
      notice("");
    } catch { notice("The viewer does not answer. Is realign view still running?"); }
    setTimeout(update, POLL_MS);
  }

  addEventListener("hashchange", async () => {
    if (store.live) {
      notice("Loading …");
      await store.load().then(() => notice(""), () => notice("The viewer does not answer. Is realign view still running?"));
    }
    const moved = shown !== current();
    render(false);
    if (moved) { scrollTo(0, 0); main.focus({ preventScroll: true }); }
  });
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => report.resizeAll(main)); });
  addEventListener("beforeprint", () => render(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(true));
  setTheme(report.remember("theme") || "auto");

  store.load().then(() => {
    render(false);
    if (store.live) setTimeout(update, POLL_MS);
  }).catch((error) => report.put(main, report.empty("The report could not be loaded: " + error.message)));
})();
