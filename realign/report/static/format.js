"use strict";
/* Numbers, durations and short statistics as text. */
(() => {
  report.isNumber = (x) => typeof x === "number" && Number.isFinite(x);

  report.number = (x) => {
    if (!report.isNumber(x)) return "–";
    const size = Math.abs(x);
    if (size >= 1000) return x.toLocaleString("en-US", { maximumFractionDigits: 0 });
    if (size !== 0 && size < 1e-3) return x.toExponential(2).replace("-", "−").replace("e−", "e-").replace("e+", "e");
    return String(Number(x.toPrecision(4))).replace(/^-/, "−");
  };

  report.signed = (x) => (report.isNumber(x) && x > 0 ? "+" : "") + report.number(x);

  report.duration = (seconds) => {
    if (!report.isNumber(seconds)) return "–";
    if (seconds < 1e-3) return Math.round(seconds * 1e6) + " µs";
    if (seconds < 1) return Math.round(seconds * 1e3) + " ms";
    if (seconds < 60) return seconds.toFixed(1) + " s";
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? hours + " h " + minutes + " min" : minutes + " min " + (whole % 60) + " s";
  };

  report.time = (text) => (text ? String(text).replace("T", " ").replace("+00:00", " UTC") : "–");

  report.plural = (count, word) => count.toLocaleString("en-US") + " " + word + (count === 1 ? "" : "s");

  const SMALLER = /loss|nll|perplexity/, LARGER = /reward|accuracy|margin|pass|mean@|score/;
  /* Whether larger values of a metric are better; null if that is unknown. */
  report.larger = (run, name) => {
    const known = run.info.larger_is_better || {};
    if (name in known) return known[name];
    if (/(^|\/)(std|missing_rewards)$/.test(name)) return null;
    return SMALLER.test(name) ? false : LARGER.test(name) ? true : null;
  };

  /* First, last and best value of a metric of a run; null if the run lacks it. */
  report.course = (run, name) => {
    const points = [];
    (run.metrics.values[name] || []).forEach((x, i) => { if (report.isNumber(x)) points.push([run.metrics.step[i], x]); });
    if (!points.length) return null;
    const stated = ((run.summary.metrics || []).find((one) => one.name === name)) || {};
    const larger = report.larger(run, name);
    let best = null;
    if (larger !== null) best = points.reduce((a, b) => ((larger ? b[1] > a[1] : b[1] < a[1]) ? b : a));
    if (report.isNumber(stated.best)) best = [stated.best_step, stated.best];
    return { first: points[0], last: points[points.length - 1], best, points };
  };

  /* The step of the records that is nearest to a step. */
  report.nearest = (records, step) => records.reduce((best, r) => (Math.abs(r.step - step) < Math.abs(best - step) ? r.step : best), records[0].step);

  /* Whether values are nothing but rounding noise, which no chart and no table shows. Zeros say something. */
  report.isNoise = (values) => {
    const sizes = values.filter(report.isNumber).map(Math.abs);
    return sizes.some((x) => x > 0) && sizes.every((x) => x < 1e-9);
  };

  /* The metrics that the run declares as most important, the evaluations first. */
  report.headline = (run) => {
    const names = Object.keys(run.metrics.values).filter((name) => !report.isNoise(run.metrics.values[name]));
    const declared = (run.info.headline || []).filter((name) => names.includes(name));
    const held = names.filter((name) => name.startsWith("eval/") && !/\/(std|missing_rewards)$/.test(name));
    const found = [...declared.filter((n) => n.startsWith("eval/")), ...held, ...declared];
    return [...new Set(found.length ? found : names.filter((n) => !n.startsWith("time/")))];
  };
})();
