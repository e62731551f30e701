"use strict";
/* Line charts: smoothing, raw values behind smoothed ones, seed bands, shared cursor and zoom. */
(() => {
  const el = report.el;
  const charts = new Set();
  let zoomed = null;

  report.resetCharts = () => { for (const chart of charts) chart.destroy(); charts.clear(); };

  report.zoom = (range) => {
    zoomed = range;
    for (const chart of charts) {
      const xs = chart.data[0];
      chart.setScale("x", range || { min: xs[0], max: xs[xs.length - 1] });
    }
    document.dispatchEvent(new Event("zoomed"));
  };
  report.zoomRange = () => zoomed;

  /* Exponential moving average that starts at the first value, without a bias towards it. */
  report.smooth = (column, weight) => {
    if (!weight) return column;
    let sum = 0, total = 0;
    return column.map((x) => {
      if (!report.isNumber(x)) return null;
      sum = weight * sum + (1 - weight) * x;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  /* Join lines with different x values to the columns of one chart. */
  function joined(lines) {
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const columns = lines.map((line) => {
      const column = new Array(xs.length).fill(null);
      line.x.forEach((x, i) => { if (report.isNumber(line.y[i])) column[place.get(x)] = line.y[i]; });
      return column;
    });
    return [xs, columns];
  }

  /* The values of a line at other x; null outside of its range. */
  function interpolated(xs, x, y) {
    let j = 0;
    return xs.map((at) => {
      if (!x.length || at < x[0] || at > x[x.length - 1]) return null;
      while (x[j + 1] !== undefined && x[j + 1] <= at) j++;
      if (x[j] === at || j === x.length - 1) return y[j];
      return y[j] + (y[j + 1] - y[j]) * (at - x[j]) / (x[j + 1] - x[j]);
    });
  }

  function axis(size, more) {
    return { stroke: style("--muted"), font: "12px " + style("--sans"), size, gap: 4,
      grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--grid"), width: 1, size: 4 }, ...more };
  }

  /* lines: [{label, x, y, color, dash, exact (never smoothed), band: [low, high]}]. Returns a card with title, legend and chart. */
  report.chart = ({ title, lines, xLabel, smoothing, height, zoomable, unit, onpoint, log }) => {
    const drawn = lines.filter((line) => line.y.some(report.isNumber));
    if (!drawn.length) return null;
    const series = [{ label: xLabel || "step" }], columns = [], bands = [];
    const [xs, raw] = joined(drawn);
    const values = [];
    drawn.forEach((line, i) => {
      if (line.band) {
        for (const column of [line.band[1], line.band[0]].map((y) => interpolated(xs, line.x, y))) {
          columns.push(column);
          series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        }
        bands.push({ series: [series.length - 2, series.length - 1], fill: line.color + "2b" });
      }
      const count = raw[i].filter(report.isNumber).length, sparse = count <= 25;
      const smoothed = count <= 8 || line.exact ? raw[i] : report.smooth(raw[i], smoothing || 0);
      if (smoothed !== raw[i]) {
        columns.push(raw[i]);
        series.push({ stroke: line.color + "40", width: 1, points: { show: false }, spanGaps: true });
      }
      columns.push(smoothed);
      values.push([line, series.length]);
      series.push({ label: line.label, stroke: line.color, width: 2, dash: line.dash, spanGaps: true,
        points: { show: sparse, size: 5, fill: line.color, stroke: line.color } });
    });
    const legend = el("ul", { class: "legend" });
    const shown = values.map(([line, place]) => {
      const value = el("b", {});
      legend.append(el("li", {}, swatch(line), el("span", {}, report.visible(line.label)), value));
      return [value, place];
    });
    const at = el("span", { class: "at" });
    const last = (column) => { for (let i = column.length - 1; i >= 0; i--) if (report.isNumber(column[i])) return column[i]; return null; };
    const show = (chart) => {
      const i = chart.cursor.idx;
      at.textContent = report.isNumber(i) ? (xLabel || "step") + " " + report.number(xs[i]) : "last";
      for (const [node, place] of shown) {
        node.textContent = report.number(report.isNumber(i) ? near(columns[place - 1], i) : last(columns[place - 1]));
      }
    };
    const body = el("div", { class: "plot", role: "img", "aria-label": summary(title, drawn) });
    const card = el("figure", { class: "card chart" },
      el("figcaption", {}, el("h3", {}, title), unit && el("span", { class: "unit" }, unit), at), legend, body);
    card.draw = () => {
      const width = Math.max(200, body.clientWidth);
      const range = zoomable && zoomed ? [zoomed.min, zoomed.max] : null;
      const chart = new uPlot({
        width, height: height || 190, legend: { show: false }, series, bands,
        padding: [8, 18, 0, 0],
        cursor: { sync: zoomable ? { key: "report" } : undefined, drag: { x: !!zoomable, y: false, setScale: false },
          points: { size: 6 } },
        scales: { x: { time: false, ...(range ? { min: range[0], max: range[1] } : {}) },
          y: log && columns.flat().every((y) => !report.isNumber(y) || y > 0) ? { distr: 3 } : { range: (u, low, high) => (low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2]
            : uPlot.rangeNum(low, high, 0.08, true)) } },
        axes: [axis(28, { label: xLabel || "step", labelSize: 16, labelGap: 0, labelFont: "12px " + style("--sans"), space: 60, incrs: wholeIncrements(xs), values: (u, splits) => splits.map((x) => tick(x)) }),
          axis(52, { ...(unit ? { label: unit, labelSize: 16, labelGap: 0, labelFont: "12px " + style("--sans") } : {}), values: (u, splits) => splits.map((x) => tick(x)) })],
        hooks: { setCursor: [show], setSelect: [(u) => {
          if (u.select.width < 8) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (zoomable) report.zoom({ min: from, max: to });
        }] },
      }, [xs, ...columns], body);
      charts.add(chart);
      chart.root.setAttribute("aria-hidden", "true");
      if (zoomable) chart.over.addEventListener("dblclick", () => report.zoom(null));
      if (onpoint) {
        let pressed = 0;
        chart.over.style.cursor = "pointer";
        chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
        chart.over.addEventListener("click", (event) => { /* not the end of a drag */
          if (Math.abs(event.clientX - pressed) < 4 && report.isNumber(chart.cursor.idx)) onpoint(xs[chart.cursor.idx]);
        });
      }
      card.resize = () => chart.setSize({ width: Math.max(200, body.clientWidth), height: height || 190 });
      show(chart);
    };
    return card;
  };

  /* Steps and tokens are whole numbers; minutes are not. */
  function wholeIncrements(xs) {
    if (!xs.every(Number.isInteger)) return undefined;
    return Array.from({ length: 9 }, (_, i) => [1, 2, 5].map((x) => x * 10 ** i)).flat();
  }

  function near(column, i) {
    for (let j = i; j >= 0; j--) if (report.isNumber(column[j])) return column[j];
    return null;
  }

  function tick(x) {
    if (x === null) return "";
    const size = Math.abs(x);
    if (size !== 0 && size < 1e-3) return x.toExponential(size < 1e-3 && Number(x.toPrecision(1)) === x ? 0 : 1).replace(/^-/, "−");
    if (size >= 1e6) return Number((x / 1e6).toPrecision(3)) + "M";
    if (size >= 1e4) return Number((x / 1e3).toPrecision(3)) + "k";
    return String(Number(x.toPrecision(4))).replace(/^-/, "−");
  }

  function swatch(line) {
    return report.svg("svg", { class: "swatch", viewBox: "0 0 18 8", width: 18, height: 8, "aria-hidden": "true" },
      report.svg("line", { x1: 1, x2: 17, y1: 4, y2: 4, stroke: line.color, "stroke-width": 2.5,
        "stroke-dasharray": line.dash ? "4 3" : null }));
  }

  function summary(title, lines) {
    return title + ". " + lines.map((line) => {
      const found = line.y.filter(report.isNumber);
      return line.label + ": first " + report.number(found[0]) + ", last " + report.number(found[found.length - 1]) +
        ", minimum " + report.number(found.reduce((a, b) => Math.min(a, b))) +
        ", maximum " + report.number(found.reduce((a, b) => Math.max(a, b)));
    }).join("; ");
  }

  /* Draw the charts of a page after it is in the document, which gives them their width. */
  report.drawAll = (root) => {
    const cards = root.querySelectorAll(".chart");
    cards.forEach((card) => card.draw && card.draw());
  };
  report.resizeAll = (root) => root.querySelectorAll(".chart").forEach((card) => card.resize && card.resize());

  report.sparkline = (column, color, width, height) => {
    const points = column.filter(report.isNumber);
    if (points.length < 2) return null;
    const low = Math.min(...points), high = Math.max(...points), span = high - low || 1;
    const w = width || 120, h = height || 28;
    const path = points.map((y, i) => (i ? "L" : "M") + (2 + (w - 4) * i / (points.length - 1)).toFixed(1) + " " +
      (h - 3 - (h - 6) * (y - low) / span).toFixed(1)).join("");
    return report.svg("svg", { class: "spark", viewBox: `0 0 ${w} ${h}`, width: w, height: h, preserveAspectRatio: "none", "aria-hidden": "true" },
      report.svg("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.8, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" }));
  };
})();
