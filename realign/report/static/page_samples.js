"use strict";
/* Page "Samples": the responses of a group, all responses as a table, and two steps or two runs on the same prompts. */
(() => {
  const { el } = report;
  const state = { view: "training", step: null, text: "", show: "all", sort: "recorded" };

  report.pages.samples = { title: "Samples", render: () => {
    const run = report.focused();
    const body = el("div", {});
    const draw = () => {
      report.resetCharts();
      report.put(body, state.view === "training" ? training(run, draw) : state.view === "table" ? report.samplesTable(run, thinned(run, "samples")) : compared());
      if (body.isConnected) report.drawAll(body);
    };
    const has = { training: run.samples.length > 0, table: true, held: report.shownRuns().some((one) => one.eval_samples.length) };
    if (!has.training && !has.held) {
      return report.empty("No samples recorded. Runs that sample responses write sample_prompts prompts per step, and the responses of evaluations.");
    }
    if (!has[state.view]) state.view = has.training ? "training" : "held";
    const asked = report.route().query.get("step");
    if (asked !== null && has.training) { state.view = "training"; state.step = report.nearest(run.samples, Number(asked)); state.text = ""; }
    const tabs = el("div", { class: "switch", role: "group", "aria-label": "samples" },
      [["training", "Training groups"], ["table", "Table"], ["held", "Side by side"]].map(([key, label]) => el("button", { type: "button", disabled: !has[key],
        "aria-pressed": String(state.view === key), onclick: (event) => {
          state.view = key;
          tabs.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === event.target)));
          draw();
        } }, label)));
    draw();
    const root = el("div", {}, tabs, body);
    root.ready = () => report.drawAll(root);
    return root;
  } };

  function groupsOf(records) {
    const groups = new Map();
    for (const record of records) {
      const key = record.step + "\n" + record.id;
      if (!groups.has(key)) groups.set(key, { step: record.step, id: record.id, prompt: record.prompt, responses: [] });
      groups.get(key).responses.push(record);
    }
    return [...groups.values()];
  }

  function stats(group) {
    const rewards = group.responses.map((r) => r.reward).filter(report.isNumber);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
    const std = rewards.length ? Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / rewards.length) : null;
    return { mean, std, count: rewards.length };
  }

  function recorded(run, group, response) {
    return run.tokens.find((t) => t.step === group.step && String(t.id) === String(group.id) && t.response === response.response_index);
  }

  /* Mean advantage of the trained tokens, for responses that tokens.jsonl contains. */
  report.advantageOf = advantageOf;
  function advantageOf(run, group, response) {
    const record = recorded(run, group, response);
    if (!record || !record.advantages) return null;
    const found = record.advantages.filter((x, i) => report.isNumber(x) && record.mask[i]);
    return found.length ? found.reduce((a, b) => a + b) / found.length : null;
  }

  function training(run, redraw) {
    const steps = [...new Set(run.samples.map((s) => s.step))];
    const searching = state.text.trim() !== "";
    if (!steps.includes(state.step)) state.step = informative(run, steps);
    const list = el("div", { "aria-live": "polite" });
    const at = el("output", {}, String(state.step));
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(state.step), "aria-label": "step", oninput: (event) => {
      state.step = steps[Number(event.target.value)]; at.textContent = String(state.step); show(); } });
    const move = (by) => { const i = Math.max(0, Math.min(steps.length - 1, steps.indexOf(state.step) + by)); state.step = steps[i]; slider.value = i; at.textContent = String(state.step); show(); };
    const show = () => {
      const text = state.text.trim().toLowerCase();
      report.keep({ step: text ? null : state.step });
      let groups = groupsOf(text ? run.samples : run.samples.filter((s) => s.step === state.step));
      if (text) groups = groups.filter((g) => (g.prompt + " " + g.id + " " + g.responses.map((r) => r.response).join(" ")).toLowerCase().includes(text));
      if (state.show === "mixed") groups = groups.filter((g) => stats(g).std > 0);
      if (state.show === "equal") groups = groups.filter((g) => stats(g).std === 0);
      if (state.show === "missing") groups = groups.filter((g) => g.responses.some((r) => r.reward === null));
      groups.sort((a, b) => (stats(b).std > 0) - (stats(a).std > 0)); /* groups with an advantage first */
      report.put(histogram, text ? null : rewardHistogram(run.samples.filter((s) => s.step === state.step)));
      const shown = groups.slice(0, 40);
      list.className = shown.every((g) => g.responses.length === 1) ? "singles" : "";
      report.put(list, ...shown.map((g) => card(run, g)), groups.length > shown.length ? report.empty("and " + (groups.length - shown.length) + " more groups") :
        groups.length ? "" : report.empty("No group matches."));
    };
    const histogram = el("div", {});
    const bar = el("div", { class: "toolbar" },
      el("div", { class: "stepper" }, "Step ", el("button", { type: "button", "aria-label": "previous step", onclick: () => move(-1) }, "‹"), slider,
        el("button", { type: "button", "aria-label": "next step", onclick: () => move(1) }, "›"), at),
      el("label", {}, "Search all steps ", el("input", { type: "search", value: state.text, placeholder: "text or id", oninput: (event) => { state.text = event.target.value; show(); } })),
      el("label", {}, "Groups ", el("select", { onchange: (event) => { state.show = event.target.value; show(); } },
        [["all", "all"], ["mixed", "with different rewards"], ["equal", "with equal rewards (no advantage)"], ["missing", "with missing rewards"]]
          .map(([key, label]) => el("option", { value: key, selected: state.show === key }, label)))),
      el("label", {}, "Sort ", el("select", { onchange: (event) => { state.sort = event.target.value; show(); } },
        [["recorded", "as sampled"], ["high", "highest reward first"], ["low", "lowest reward first"]].map(([key, label]) => el("option", { value: key, selected: state.sort === key }, label)))));
    show();
    return el("div", {}, bar, thinned(run, "samples"), histogram, list);
  }

  /* The last step with different rewards in a group, which shows more than one where all are equal. */
  function informative(run, steps) {
    const mixed = groupsOf(run.samples).filter((group) => stats(group).std > 0);
    return mixed.length ? mixed[mixed.length - 1].step : steps[steps.length - 1];
  }

  /* A line that says how many steps with records are not in the page. */
  function thinned(run, name) {
    const [shown, all] = run.steps_of[name];
    const option = (report.store.live ? "view" : "report") + ".samples_mb";
    return shown < all && el("p", { class: "about" }, `Shows ${shown} of ${all} recorded steps. ${option}=${Math.ceil(3 * all / Math.max(1, shown))} shows more.`);
  }
  report.thinned = thinned;

  const BINS = 12;

  /* How often each reward occurs among the recorded responses of a step. */
  function rewardHistogram(samples) {
    const lengths = samples.map((s) => s.response.length);
    const bars = [["reward", samples.map((s) => s.reward).filter(report.isNumber)], ["response length (characters)", lengths]].map(([title, values]) => {
      if (values.length < 4) return null;
      const low = Math.min(...values), high = Math.max(...values), width = (high - low) / BINS || 1;
      const counts = new Array(high > low ? BINS : 1).fill(0);
      for (const x of values) counts[Math.min(counts.length - 1, Math.floor((x - low) / width))]++;
      const most = Math.max(...counts), label = counts.map((n, i) => report.number(low + i * width) + ": " + n).join(", ");
      return el("figure", { class: "card histogram", role: "img", "aria-label": title + ", lower bound: count. " + label },
        el("figcaption", {}, title, " of ", report.plural(values.length, "response")),
        el("div", { class: "bars", "aria-hidden": "true" }, counts.map((n, i) => el("i", { style: { height: 100 * n / most + "%" }, title: report.number(low + i * width) + ": " + n }))),
        el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, report.number(low)), el("span", {}, high > low ? report.number(high) : "")));
    });
    return el("div", { class: "histograms" }, bars);
  }

  /* Identical responses with the same reward, together. */
  function distinct(responses) {
    const found = new Map();
    for (const r of responses) {
      const key = r.reward + "\n" + r.response;
      if (found.has(key)) found.get(key).times++; else found.set(key, { ...r, times: 1 });
    }
    return [...found.values()];
  }

  function card(run, group) {
    const { mean, std, count } = stats(group);
    const responses = distinct(group.responses);
    if (state.sort !== "recorded") responses.sort((a, b) => (state.sort === "high" ? 1 : -1) * ((b.reward ?? -Infinity) - (a.reward ?? -Infinity)));
    const largest = Math.max(1e-9, ...responses.map((r) => Math.abs((r.reward ?? mean) - mean)));
    return el("article", { class: "card group" },
      el("header", {}, el("h3", {}, "Prompt ", el("code", {}, report.visible(String(group.id)))),
        el("span", { class: "muted" }, "step ", group.step, " · ", report.plural(group.responses.length, "response"),
          count ? [" · mean reward ", report.number(mean), " · std ", report.number(std)] : "",
          report.isNumber(group.responses[0].pass_rate) && el("span", { title: "rolling pass rate, by which the curriculum chose this prompt" }, " · pass rate before ", report.number(group.responses[0].pass_rate)))),
      el("pre", { class: "prompt" }, report.visible(group.prompt)),
      el("div", { class: "responses" }, responses.map((r) => response(run, group, r, mean, largest))));
  }

  function response(run, group, r, mean, largest) {
    const relative = report.isNumber(r.reward) && mean !== null ? r.reward - mean : null;
    const advantage = advantageOf(run, group, r);
    const width = relative === null ? 0 : 50 * Math.abs(relative) / largest;
    return el("div", { class: "response" },
      el("div", { class: "score" },
        el("span", { class: "reward" }, report.isNumber(r.reward) ? ["reward ", el("b", {}, report.number(r.reward))] : "no reward"),
        relative !== null && group.responses.length > 1 && el("span", { class: "muted", title: "reward minus the mean reward of the group" }, report.signed(relative), " vs. group"),
        advantage !== null && el("span", { title: "mean advantage of the trained tokens" }, "advantage ", el("b", {}, report.signed(advantage))),
        r.times > 1 && el("span", { class: "tag", title: "identical responses" }, "× " + r.times),
        recorded(run, group, r) && el("a", { href: report.link("tokens", null, { step: group.step, id: group.id, response: r.response_index }) }, "tokens"),
        report.isNumber(r.kl) && el("span", { class: "muted", title: "log-prob difference to the reference, summed over the response" }, "KL ", report.number(r.kl))),
      group.responses.length > 1 && el("div", { class: "diverging", "aria-hidden": "true" },
        el("i", { class: relative >= 0 ? "up" : "down", style: { width: width + "%", [relative >= 0 ? "left" : "right"]: "50%" } })),
      el("pre", {}, r.response === "" ? el("span", { class: "muted" }, "(empty)") : report.visible(r.response)),
      r.rewards && el("div", { class: "named" }, Object.entries(r.rewards).map(([name, x]) => el("span", { class: "tag" }, name, " ", report.number(x)))));
  }

  /* What can be compared: each evaluation of each shown run. */
  function sources() {
    const runs = report.shownRuns(), named = runs.length > 1 ? report.names(runs) : null;
    return runs.flatMap((run, i) => [...new Set(run.eval_samples.map((r) => r.step))].map((step) => ({ run, step, label: (named ? named[i] + ", " : "") + "step " + step })));
  }

  /* The prompts of an evaluation, each with its responses, by set and text: ids differ between runs on other files. */
  function byPrompt({ run, step }) {
    const found = new Map();
    for (const r of run.eval_samples) {
      const key = (r.evaluation || "") + "\n" + r.prompt;
      if (r.step === step) found.set(key, [...(found.get(key) || []), r]);
    }
    return found;
  }

  const KINDS = { fixed: "wrong before, right after", broken: "right before, wrong after", better: "higher reward", worse: "lower reward", same: "same reward" };
  const between = { before: 0, after: null, kind: "all", text: "", keys: "" };

  /* Two evaluations, of one run or of two, on the prompts that both have. */
  function compared() {
    const all = sources(), keys = all.map((one) => one.label).join("\n");
    const last = (run) => all.findLastIndex((one) => one.run === run), runs = report.shownRuns().filter((run) => run.eval_samples.length);
    if (between.keys !== keys) Object.assign(between, { keys, before: runs.length > 1 ? last(runs[0]) : 0, after: last(runs[Math.min(1, runs.length - 1)]) });
    const body = el("div", {});
    const show = () => {
      const [before, after] = [all[between.before], all[between.after]], [left, right] = [before, after].map(byPrompt);
      const success = Number(after.run.config["evaluation.success"] ?? 1);
      const pairs = [...right].filter(([key]) => left.has(key)).map(([key, responses]) => {
        const [x, y] = [left.get(key), responses].map((some) => stats({ responses: some }).mean);
        const known = report.isNumber(x) && report.isNumber(y), good = (mean) => mean >= success / 2;
        const kinds = !known ? [] : [x < y ? "better" : x > y ? "worse" : "same", ...(good(x) === good(y) ? [] : [good(y) ? "fixed" : "broken"])];
        return { prompt: responses[0], left: left.get(key), right: responses, kinds };
      });
      const share = (kind) => { const n = pairs.filter((pair) => pair.kinds.includes(kind)).length; return [el("b", {}, Math.round(100 * n / Math.max(1, pairs.length)) + "% " + kind), " (" + n + ")"]; };
      const words = between.text.toLowerCase();
      const found = pairs.filter((pair) => (between.kind === "all" || pair.kinds.includes(between.kind)) &&
        [pair.prompt.prompt, ...[...pair.left, ...pair.right].map((r) => r.response)].join(" ").toLowerCase().includes(words));
      report.put(body, el("p", { class: "about" }, share("fixed"), ", ", share("broken"), ", ", share("better"), ", ", share("worse"), " of ", report.plural(pairs.length, "recorded prompt"),
        ". Right: a mean reward of at least half of evaluation.success=" + report.number(success) + "."),
      found.slice(0, 60).map((pair) => el("article", { class: "card group" }, el("header", {}, el("h3", {}, "Prompt ", el("code", {}, report.visible(String(pair.prompt.id)))),
        pair.prompt.evaluation && el("span", { class: "muted" }, report.visible(pair.prompt.evaluation)),
        pair.prompt.answer && el("span", { class: "muted" }, "answer ", report.visible(pair.prompt.answer)),
        pair.kinds.filter((kind) => kind !== "same").map((kind) => el("span", { class: "tag " + kind }, kind))),
      el("pre", { class: "prompt" }, report.visible(pair.prompt.prompt)),
      el("div", { class: "responses two" }, side(before.label, pair.left), side(after.label, pair.right)))),
      found.length > 60 ? report.empty("and " + (found.length - 60) + " more prompts") : found.length ? "" : report.empty("No prompt matches."));
    };
    const choice = (name) => el("label", {}, name + " ", el("select", { "aria-label": name, onchange: (event) => { between[name] = Number(event.target.value); show(); } },
      all.map((one, i) => el("option", { value: i, selected: between[name] === i }, report.visible(one.label)))));
    show();
    return el("div", {}, el("div", { class: "toolbar" }, choice("before"), choice("after"),
      el("label", {}, "Show ", el("select", { onchange: (event) => { between.kind = event.target.value; show(); } },
        [["all", "all prompts"], ...Object.entries(KINDS)].map(([key, label]) => el("option", { value: key, selected: between.kind === key }, key === "all" ? label : key + ": " + label)))),
      el("label", {}, "Search ", el("input", { type: "search", value: between.text, oninput: (event) => { between.text = event.target.value; show(); } }))), body);
  }

  function side(title, responses) {
    const { mean, count } = stats({ responses });
    return el("div", { class: "response" }, el("div", { class: "score" }, el("span", { class: "muted" }, report.visible(title)),
      el("span", { class: "reward" }, count ? [responses.length > 1 ? "mean reward " : "reward ", el("b", {}, report.number(mean))] : "no reward")),
    distinct(responses).map((r) => [el("pre", {}, r.response === "" ? el("span", { class: "muted" }, "(empty)") : report.visible(r.response)),
      responses.length > 1 && el("p", { class: "muted small" }, r.times > 1 ? "× " + r.times + ", " : "", "reward ", report.number(r.reward))]));
  }
})();
