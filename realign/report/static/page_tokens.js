"use strict";
/* Page "Tokens": each token of a response, colored by one of its values; hover or arrow keys show all values. */
(() => {
  const { el } = report;
  const state = { step: null, record: 0, by: null };
  /* Scale: "low" colors low values, "high" high values, "zero" and "one" diverge from 0 or 1, "class" are categories. */
  const COLUMNS = [
    ["advantages", "Advantage", "zero", "how much better than expected this token was"],
    ["logprobs", "Log-prob (sampler)", "low", "log-probability when the token was sampled"],
    ["trainer_logprobs", "Log-prob (trainer)", "low", "log-probability under the weights that are trained"],
    ["ratio", "Ratio", "one", "probability under the trained weights divided by the old one"],
    ["kl", "KL to reference", "zero", "log-prob of the sampler minus log-prob of the reference"],
    ["kl_penalty", "KL penalty", "zero", "term of the loss"],
    ["entropy", "Entropy", "high", "entropy of the distribution from which the token was sampled, in nats"],
    ["values", "Value", "zero", "estimated value of the state before the token"],
    ["returns", "Return", "zero", "target of the value"],
    ["ref_logprobs", "Log-prob (reference)", "low", "log-probability under the reference policy"],
    ["mask", "Trained", "class", "whether the token is in the loss"],
    ["versions", "Policy version", "class", "number of training steps of the policy that sampled the token"],
  ];

  report.pages.tokens = { title: "Tokens", render: () => {
    const run = report.focused();
    if (!run.tokens.length) return report.empty("No tokens recorded. Set records.token_prompts to at least 1 and records.every_steps to the interval in steps.");
    const body = el("div", {}), { query } = report.route();
    if (query.has("step")) state.step = report.nearest(run.tokens, Number(query.get("step")));
    if (query.has("color")) state.by = query.get("color");
    if (query.has("id")) state.record = Math.max(0, run.tokens.filter((t) => t.step === state.step)
      .findIndex((t) => String(t.id) === query.get("id") && String(t.response) === query.get("response")));
    const draw = () => { report.resetCharts(); report.put(body, view(run, draw)); report.drawAll(body); };
    const root = el("div", {}, body);
    root.ready = draw;
    return root;
  } };

  const has = (record, name) => Array.isArray(record[name]) && record[name].some((x) => x !== null);

  /* The last step with different rewards, or advantages that are not 0. */
  function informative(run, steps) {
    const telling = run.tokens.filter((t) => (t.advantages || []).some((x) => x));
    return telling.length ? telling[telling.length - 1].step : steps[steps.length - 1];
  }

  function view(run, redraw) {
    const steps = [...new Set(run.tokens.map((t) => t.step))];
    if (!steps.includes(state.step)) state.step = informative(run, steps);
    const records = run.tokens.filter((t) => t.step === state.step);
    const record = records[Math.min(state.record, records.length - 1)];
    const available = COLUMNS.filter(([name]) => records.some((one) => has(one, name)));
    if (!available.some(([name]) => name === state.by)) state.by = available[0][0];
    const column = available.find(([name]) => name === state.by);
    report.keep({ step: state.step, color: state.by });
    const scale = scaleOf(records, column);
    const detail = el("dl", { class: "detail card", "aria-live": "polite" });
    const bar = el("div", { class: "toolbar" },
      el("label", {}, "Step ", el("select", { onchange: (event) => { state.step = Number(event.target.value); state.record = 0; report.keep({ id: null, response: null }); redraw(); } },
        steps.map((step) => el("option", { value: step, selected: step === state.step }, step)))),
      el("label", {}, "Color ", el("select", { id: "color-by", onchange: (event) => { state.by = event.target.value; redraw(); } },
        available.map(([name, label]) => el("option", { value: name, selected: name === state.by }, label)))));
    const tokens = records.map((one) => el("section", { class: "response-tokens" + (one === record && state.record ? " asked" : "") },
      el("h3", {}, el("span", {}, "Prompt ", el("code", {}, report.visible(String(one.id))), ", response ", one.response + 1),
        report.isNumber(one.reward) && el("span", {}, "reward ", el("b", {}, report.number(one.reward)))),
      tokenList(one, column, scale, detail, available, one === record)));
    const line = report.chart({ title: column[1] + " by token", xLabel: "token", height: 170, lines: records.filter((one) => has(one, state.by)).map((one, i) => {
      const first = Math.max(0, (one.given || []).lastIndexOf(1) + 1 - 3);
      return { label: (new Set(records.map((r) => r.id)).size > 1 ? one.id + ", " : "") + "response " + (one.response + 1), color: report.palette(i),
        exact: true, x: one.tokens.map((_, j) => one.start + j).slice(first), y: one[state.by].slice(first) };
    }) });
    return el("div", {}, bar, report.thinned(run, "tokens"),
      el("div", { class: "tokenview" },
        el("div", {},
          el("section", { class: "card" },
            el("header", { class: "row" }, el("p", { class: "about" }, column[1], ": ", column[3], "."), legend(scale)),
            tokens,
            el("p", { class: "about small" }, "Underlined: prompt. Dotted: not in the loss. ",
              records.some((one) => one.start > 0 || one.start + one.tokens.length < one.length) ? "Very long sequences are recorded in part. " : "",
              el("span", { class: "screen" }, "Hover a token, or focus the text and use the arrow keys."))),
          state.by === "mask" ? null : line),
        detail));
  }

  function scaleOf(records, [name, , kind]) {
    const found = records.flatMap((record) => (record[name] || []).filter(report.isNumber));
    const low = Math.min(...found), high = Math.max(...found);
    if (kind === "class") {
      const classes = [...new Set(found)].sort((a, b) => a - b);
      const label = (x) => (name === "mask" ? (x ? "trained" : "not trained") : "version " + x);
      return { kind, classes, label, color: (x) => (name === "mask" ? (x ? mix("--hue-up", 0.45) : "transparent") : palette(classes.indexOf(x))) };
    }
    if (kind === "zero" || kind === "one") {
      const center = kind === "one" ? 1 : 0, span = Math.max(Math.abs(low - center), Math.abs(high - center)) || 1;
      return { kind, low: center - span, center, high: center + span,
        color: (x) => mix(x >= center ? "--hue-up" : "--hue-down", 0.75 * Math.abs(x - center) / span) };
    }
    const span = high - low || 1;
    return { kind, low, high, color: (x) => mix("--hue-seq", 0.75 * (kind === "low" ? high - x : x - low) / span) };
  }

  function mix(hue, amount) { return `color-mix(in srgb, var(${hue}) ${(100 * amount).toFixed(1)}%, transparent)`; }
  function palette(i) { return report.palette(i) + "55"; }

  function legend(scale) {
    if (scale.kind === "class") {
      return el("div", { class: "scale" }, scale.classes.map((x) => el("span", { class: "class" }, el("i", { style: { background: scale.color(x) } }), scale.label(x))));
    }
    const stops = [0, 0.25, 0.5, 0.75, 1].map((t) => scale.color(scale.low + t * (scale.high - scale.low)));
    return el("div", { class: "scale", "aria-label": "color scale" }, report.number(scale.low),
      el("i", { class: "ramp", style: { background: "linear-gradient(to right, " + stops.join(", ") + ")" } }), report.number(scale.high));
  }

  function tokenList(record, [name], scale, detail, available, first) {
    const tip = el("div", { class: "tip", role: "tooltip", hidden: true }), prefix = "token-" + record.id + "-" + record.response + "-";
    const given = record.given || record.tokens.map(() => 0);
    const box = el("div", { class: "tokens", tabindex: "0", role: "listbox", "aria-label": "tokens of the response; use the arrow keys" });
    let current = given.findIndex((x) => !x);
    if (current < 0) current = 0;
    const nodes = record.tokens.map((token, i) => {
      const value = (record[name] || [])[i];
      const kinds = ["token", given[i] ? "given" : "", record.mask && !record.mask[i] && !given[i] ? "masked" : ""];
      return el("span", { class: kinds.join(" ").trim(), role: "option", id: prefix + i, "data-i": i, "aria-label": spoken(record, i, available),
        style: report.isNumber(value) ? { background: scale.color(value) } : {} }, shown(record.text[i]));
    });
    const show = (i, hover) => {
      nodes[current].removeAttribute("aria-selected");
      current = i;
      nodes[i].setAttribute("aria-selected", "true");
      box.setAttribute("aria-activedescendant", prefix + i);
      report.put(detail, ...entries(record, i, available));
      if (!hover) { tip.hidden = true; return; }
      report.put(tip, el("dl", {}, entries(record, i, available)));
      tip.hidden = false;
      const at = nodes[i].getBoundingClientRect(), frame = box.getBoundingClientRect();
      tip.style.left = Math.max(0, Math.min(at.left - frame.left, frame.width - tip.offsetWidth)) + "px";
      tip.style.top = at.bottom - frame.top + 6 + "px";
    };
    box.append(...nodes.flatMap((node, i) => (record.text[i].includes("\n") ? [node, el("br", {})] : [node])), tip);
    box.addEventListener("mouseover", (event) => { const t = event.target.closest(".token"); if (t) show(Number(t.dataset.i), true); });
    box.addEventListener("mouseleave", () => { tip.hidden = true; });
    box.addEventListener("click", (event) => { const t = event.target.closest(".token"); if (t) show(Number(t.dataset.i), true); });
    box.addEventListener("focus", () => show(current, true));
    box.addEventListener("blur", () => { tip.hidden = true; });
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") tip.hidden = true;
      if (by === undefined) return;
      event.preventDefault();
      show(Math.max(0, Math.min(nodes.length - 1, current + by)), true);
      nodes[current].scrollIntoView({ block: "nearest" });
    });
    box.addEventListener("blur", () => nodes[current].removeAttribute("aria-selected"));
    if (first) queueMicrotask(() => show(current, false));
    return box;
  }

  function shown(text) {
    if (text === "") return "·";
    return report.visible(text.replace(/\n/g, "⏎").replace(/\t/g, "⇥"));
  }

  function entries(record, i, available) {
    const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
    return [pair("Token", el("code", {}, shown(record.text[i]))), pair("Id", record.tokens[i]), pair("Position", record.start + i),
      ...available.filter(([name]) => name !== "mask").map(([name, label]) => pair(label, exact((record[name] || [])[i]))),
      pair("In the loss", record.mask ? (record.mask[i] ? "yes" : "no") : "–")];
  }

  /* Values are shown as the file has them. */
  function exact(x) { return x === null || x === undefined ? "–" : String(x); }
  function spoken(record, i, available) {
    return record.text[i] + ". " + available.map(([name, label]) => label + " " + exact((record[name] || [])[i])).join(", ");
  }
})();
