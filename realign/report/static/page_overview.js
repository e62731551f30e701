"use strict";
/* Page "Overview": headline numbers, warnings, facts about the run and its settings. */
(() => {
  const { el } = report;

  report.pages.overview = { title: "Overview", render: () => {
    const runs = report.shownRuns(), run = report.focused();
    return el("div", {},
      runs.map((one) => diagnosis(one, runs.length > 1)),
      runs.length > 1 ? runs.map(summaryLine) : kpis(run),
      runs.length > 1 ? null : headlines(run),
      warnings(runs),
      runs.length > 1 ? differences(runs, 12) : null,
      facts(run, runs.length > 1),
      settings(run));
  } };

  function primary(run) {
    const names = report.headline(run).filter((name) => report.larger(run, name) !== null);
    return names[0] || report.headline(run)[0];
  }

  function kpi(label, value, about, spark) {
    return el("div", { class: "card kpi" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value),
      about && el("div", { class: "about" }, about), spark);
  }

  function kpis(run) {
    const name = primary(run), course = name && report.course(run, name);
    const training = report.headline(run).find((n) => !n.startsWith("eval/") && report.course(run, n));
    const other = training && report.course(run, training);
    const steps = run.metrics.step, done = steps.length ? steps[steps.length - 1] : 0;
    const seconds = run.metrics.seconds.length ? run.metrics.seconds[run.metrics.seconds.length - 1] : null;
    const stepTimes = (run.metrics.values.step_s || []).filter(report.isNumber);
    return el("div", { class: "kpis" },
      course && kpi(name, report.number(course.last[1]), course.best
        ? ["best ", report.number(course.best[1]), " at step ", report.number(course.best[0]), " · first ", report.number(course.first[1])]
        : ["first ", report.number(course.first[1])], report.sparkline(run.metrics.values[name], report.palette(0), 220, 36)),
      other && kpi(training, report.number(other.last[1]), ["first ", report.number(other.first[1])],
        report.sparkline(report.smooth(run.metrics.values[training], 0.8), report.palette(1), 220, 36)),
      kpi("Progress", [report.number(done), el("small", {}, " of " + report.number(run.info.steps || run.summary.steps), " steps")],
        [report.pill(run.status.state), run.status.reason ? [" ", report.visible(run.status.reason)] : ""]),
      kpi("Duration", report.duration(seconds), stepTimes.length
        ? "median " + report.duration([...stepTimes].sort((a, b) => a - b)[stepTimes.length >> 1]) + " per step" : null));
  }

  function summaryLine(run) {
    const name = primary(run), course = name && report.course(run, name);
    const steps = run.metrics.step;
    return el("div", { class: "card line", style: { "--run": report.colorOf(run) } },
      el("strong", {}, report.visible(run.key)), report.pill(run.status.state),
      course && el("span", {}, el("span", { class: "muted" }, name, " "), el("b", {}, report.number(course.last[1])),
        course.best && el("span", { class: "muted" }, " best ", report.number(course.best[1]), " at step ", report.number(course.best[0]))),
      el("span", { class: "muted" }, report.number(steps[steps.length - 1]), " steps, ", report.duration(run.metrics.seconds[steps.length - 1])),
      name && report.sparkline(run.metrics.values[name], report.colorOf(run), 140, 28));
  }

  function headlines(run) {
    const names = report.headline(run).slice(0, 14);
    const rows = names.map((name) => {
      const course = report.course(run, name);
      if (!course) return null;
      return el("tr", {}, el("th", { scope: "row" }, name),
        el("td", { class: "number" }, report.number(course.first[1])),
        el("td", { class: "number" }, course.best ? [report.number(course.best[1]), el("small", {}, " step ", report.number(course.best[0]))] : "–"),
        el("td", { class: "number" }, el("b", {}, report.number(course.last[1]))),
        el("td", { class: "trend" }, report.sparkline(report.smooth(run.metrics.values[name], 0.6), report.colorOf(run))));
    });
    return report.section("Headline metrics", "We mark the best value where the direction is clear.",
      report.table(["metric", "first", "best", "last", ""], rows, { label: "headline metrics" }));
  }

  /* What keeps a run from learning: one sentence, then each cause with its evidence and a command. */
  function diagnosis(run, named) {
    const { sentence, causes } = run.diagnosis;
    return el("div", { class: causes.length ? "card diagnosis" : "card diagnosis good" },
      el("strong", {}, causes.length ? "" : "✓ ", named ? report.visible(run.key) + ": " : "", report.visible(sentence)),
      causes.map((cause) => el("details", { open: !named && cause === causes[0] },
        el("summary", {}, report.visible(cause.sentence), el("span", { class: "muted" }, " ", cause.surety)),
        el("ul", {}, cause.evidence.map((fact) => el("li", {}, report.visible(fact)))),
        el("p", {}, report.visible(cause.advice)),
        cause.command && el("code", {}, report.visible(cause.command)))));
  }

  function warnings(runs) {
    const found = runs.flatMap((run) => {
      const counted = new Map();
      for (const one of run.warnings) {
        const entry = counted.get(one.message) || { run, message: one.message, steps: [] };
        entry.steps.push(one.step);
        counted.set(one.message, entry);
      }
      return [...counted.values()];
    });
    if (!found.length) return report.section("Warnings", null, el("p", { class: "good" }, "✓ No warnings."));
    return report.section("Warnings", null, el("ul", { class: "warnings" }, found.map((one) => el("li", {},
      el("span", { class: "muted" }, runs.length > 1 ? [report.visible(one.run.key), " · "] : "", "step ", one.steps[0],
        one.steps.length > 1 ? " and " + report.plural(one.steps.length - 1, "more time") : ""),
      el("div", {}, report.visible(one.message))))));
  }

  function dot(run) { return el("span", { class: "dot", style: { background: report.colorOf(run) }, "aria-hidden": "true" }); }
  report.dot = dot;

  function facts(run, named) {
    const { info } = run, attempts = info.attempts || [], last = attempts[attempts.length - 1] || {};
    const git = info.git, device = info.device || {};
    const entries = [
      ["Command", last.command && el("code", {}, report.visible(last.command.join(" ")))],
      ["Folder", el("code", {}, report.visible(run.folder))],
      ["Started", report.time((attempts[0] || {}).started)],
      ["Ended", last.ended ? report.time(last.ended) : run.status.state],
      ["Attempts", attempts.length > 1 ? attempts.map((one) => el("div", {}, "steps ", one.first_step, " to ", one.last_step, ": ",
        one.status || "no end recorded", one.reason ? [" (", report.visible(one.reason), ")"] : "")) : null],
      ["Seed", info.seed],
      ["Models", Object.entries(info.models || {}).map(([role, about]) => el("div", {}, el("b", {}, role), " ", about))],
      ["Device", [(device.gpus || []).length ? device.gpus.join(", ") + " · " : "", device.machine, " · ",
        device.cpu_cores, " CPU cores · ", device.torch_threads, " torch threads"]],
      ["Versions", Object.entries(info.versions || {}).map(([name, v]) => el("span", { class: "tag" }, name + " " + v))],
      ["Git", git ? [el("code", {}, git.commit.slice(0, 12)), " on ", report.visible(git.branch || "?")] : "no repository"],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    return report.section(named ? "Run " + run.key : "Run", null,
      el("dl", { class: "facts" }, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  }

  function settings(run) {
    const all = Object.entries(run.config);
    if (!all.length) return null;
    const body = el("tbody", {});
    const show = (text) => report.put(body, ...all.filter(([key, value]) => (key + "=" + value).toLowerCase().includes(text.toLowerCase()))
      .map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, report.visible(key)), el("td", {}, el("code", {}, report.visible(value === null ? "null" : value))))));
    show("");
    return report.section("Settings", report.plural(all.length, "value") + " of the composed config, with all defaults.",
      el("details", { class: "settings" }, el("summary", {}, "Show all settings"),
        el("label", { class: "search" }, "Filter ", el("input", { type: "search", placeholder: "lr, kl, generation …", oninput: (event) => show(event.target.value) })),
        el("div", { class: "scroll" }, el("table", {}, body))));
  }

  /* Config keys whose values differ between runs. */
  report.differing = (runs) => {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
    return keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1);
  };

  const NAMES = ["name", "output_dir", "resume", "resume_allow", "resume_skip"], SEED = /(^|\.)seed$/, MOST = 3;

  /* Runs that differ only in their seeds and names, together; as `seed_groups` in compare.py. */
  report.seedGroups = (runs) => {
    const groups = new Map();
    for (const run of runs) {
      const same = Object.entries(run.config).filter(([key]) => !NAMES.includes(key) && !SEED.test(key));
      const key = same.length ? JSON.stringify(same.sort()) : run.key;
      groups.set(key, [...(groups.get(key) || []), run]);
    }
    const seeds = (run) => JSON.stringify(Object.entries(run.config).filter(([key]) => SEED.test(key)));
    return [...groups.values()].flatMap((group) => (new Set(group.map(seeds)).size === group.length ? [group] : group.map((run) => [run])));
  };

  /* A name for each run by the settings that differ, such as "std=group"; as `names` in compare.py. */
  report.names = (runs) => {
    const folders = runs.map((run) => run.key);
    const keys = report.differing(runs).filter((key) => !NAMES.includes(key) && runs.every((run) => key in run.config));
    if (keys.length > MOST && !folders.some((key) => /(^|\/)\d+$/.test(key))) return folders;
    const distinct = (some) => new Set(runs.map((run) => JSON.stringify(some.map((key) => run.config[key])))).size;
    const settings = keys.filter((key) => !SEED.test(key));
    let chosen = settings;
    if (chosen.length > MOST || distinct(chosen) < runs.length) {
      chosen = [];
      for (const key of [...settings, ...keys.filter((one) => SEED.test(one))]) if (distinct([...chosen, key]) > distinct(chosen)) chosen.push(key);
    }
    if (!chosen.length || chosen.length > MOST || distinct(chosen) < runs.length) return folders;
    const plain = chosen.map((key) => key.replace(/\._target_$/, ""));
    const short = plain.map((key) => {
      const words = key.split("."), ends = words.map((word, i) => words.slice(words.length - 1 - i).join("."));
      return ends.find((end) => plain.filter((one) => ("." + one).endsWith("." + end)).length === 1) || key;
    });
    const value = (run, key) => (key.endsWith("._target_") ? String(run.config[key]).split(".").pop() : String(run.config[key]));
    return runs.map((run) => chosen.map((key, i) => short[i] + "=" + value(run, key)).join(" "));
  };

  function differences(runs, most) {
    const keys = report.differing(runs).filter((key) => !NAMES.includes(key)), everywhere = keys.filter((key) => runs.every((run) => key in run.config));
    const others = keys.filter((key) => !everywhere.includes(key));
    if (!keys.length) return report.section("Different settings", null, report.empty("All settings are equal."));
    const table = (some) => report.table(["key", ...report.names(runs).map((name, i) => [dot(runs[i]), report.visible(name)])],
      some.map((key) => el("tr", {}, el("th", { scope: "row" }, report.visible(key)), runs.map((run) => el("td", {}, el("code", {},
        report.visible(run.config[key] === undefined ? "–" : run.config[key] === null ? "null" : run.config[key])))))),
      { left: true, label: "different settings" });
    const more = keys.length - Math.min(everywhere.length, most || Infinity);
    return report.section("Different settings", null, everywhere.length ? table(everywhere.slice(0, most)) : null,
      most && more ? el("p", { class: "about" }, el("a", { href: report.link("compare") }, report.plural(more, "more difference"))) : null,
      !most && others.length ? el("details", { class: "settings" }, el("summary", {}, report.plural(others.length, "key"), " of components that only some runs have"), table(others)) : null);
  }
  report.differences = differences;
})();
