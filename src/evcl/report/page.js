"use strict";
// Draws the figures of the page from its data, in the colours of the reader's theme, and lets methods be switched off.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const switches = [...document.querySelectorAll("[data-switch]")];
  const status = document.getElementById("shown");
  const MANY = 12; // with more methods than this, a figure has colours for the best few only
  const FEW = 8;
  let ready = false;

  const on = (name) => switches.find((box) => box.dataset.switch === String(name))?.checked ?? true;
  const theme = {}; // the colours of the page, read once for each drawing
  const css = (name) => (theme[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  const color = (series) => data.series[series][dark.matches ? "dark" : "light"];
  const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
  // plotly reads a little HTML in texts; a name is only a name
  const plain = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const label = (series, longest = Infinity) => {
    const name = data.series[series].label;
    return plain(name.length > longest ? `${name.slice(0, longest - 1)}\u2026` : name);
  };
  const spread = (value, sd, digits) => value.toFixed(digits) + (sd === null ? "" : ` ± ${sd.toFixed(digits)}`);
  const marker = (series, size) => {
    const one = data.series[series];
    return { symbol: one.symbol, size: size * Math.sqrt(one.size), color: color(series), line: { width: 1, color: css("--back") } };
  };

  // The series that a figure draws in their colours: all, or the best few and the first.
  function focus(shown) {
    if (shown.length <= MANY) return new Set(shown.map((line) => line.series));
    const best = shown.toSorted((a, b) => a.rank - b.rank).slice(0, FEW);
    return new Set([shown[0], ...best].map((line) => line.series));
  }
  const thin = (line) => ({ meta: line.series, mode: "lines", line: { color: faint(css("--soft"), 0.45), width: 1 }, hoverinfo: "text" });
  const middle = (values) => values.toSorted((a, b) => a - b)[Math.floor((values.length - 1) / 2)];

  function curveTraces(figure, panel) {
    const axes = { xaxis: `x${panel + 1}`, yaxis: `y${panel + 1}` };
    const traces = [];
    const tasks = figure.lines[0].mean.map((_, t) => t + 1);
    const every = figure.lines.filter((line) => on(line.series));
    const bright = focus(every);
    const shown = every.filter((line) => bright.has(line.series));
    for (const line of every.filter((one) => !bright.has(one.series))) {
      const known = tasks.filter((t) => line.mean[t - 1] !== null);
      const text = known.map((t) => `${label(line.series)}<br>after task ${t}: ${spread(line.mean[t - 1], line.sd[t - 1], 2)}`);
      traces.push({ ...axes, ...thin(line), x: known, y: known.map((t) => line.mean[t - 1]), text });
    }
    for (const line of shown) {
      const known = tasks.filter((t) => line.mean[t - 1] !== null);
      const x = line.seeds.flatMap(() => known);
      if (x.length) {
        traces.push({ ...axes, meta: line.series, x, y: line.seeds.flatMap((seed) => known.map((t) => seed[t - 1])), mode: "markers", marker: { size: 3, color: faint(color(line.series), 0.6) }, hoverinfo: "skip" });
      }
      if (known.length > 1 && line.sd[known[0] - 1] !== null) {
        const top = known.map((t) => Math.min(figure.most ?? Infinity, line.mean[t - 1] + line.sd[t - 1]));
        const low = known.map((t) => line.mean[t - 1] - line.sd[t - 1]);
        traces.push({
          ...axes, meta: line.series, x: [...known, ...known.toReversed()], y: [...top, ...low.toReversed()],
          mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faint(color(line.series), 0.13), hoverinfo: "skip",
        });
      }
    }
    if (panel === 0 && on("published")) {
      for (const line of shown.filter((one) => one.published)) {
        const look = marker(line.series, 5);
        traces.push({
          ...axes, meta: line.series, x: tasks, y: line.published, mode: "lines+markers",
          line: { color: color(line.series), width: 1.5, dash: "5px,4px" }, hoverinfo: "text",
          marker: { ...look, color: css("--back"), line: { width: 1.2, color: color(line.series) } },
          text: tasks.map((t) => `${label(line.series)}, published<br>after task ${t}: ${line.published[t - 1].toFixed(1)}`),
        });
      }
    }
    for (const line of shown.toReversed()) {
      const known = tasks.filter((t) => line.mean[t - 1] !== null);
      const trace = {
        ...axes, meta: line.series, x: known, y: known.map((t) => line.mean[t - 1]), mode: "lines+markers",
        line: { color: color(line.series), width: 2.2 }, marker: marker(line.series, 8), hoverinfo: "text",
        text: known.map((t) => `${label(line.series)}<br>after task ${t}: ${spread(line.mean[t - 1], line.sd[t - 1], 2)}`),
      };
      if (known.length === 1 && line.sd[known[0] - 1] !== null) {
        trace.error_y = { array: [line.sd[known[0] - 1]], color: color(line.series), thickness: 1.5, width: 4 };
      }
      traces.push(trace);
    }
    return traces;
  }

  function curves(figure, wide) {
    const panels = figure.enlarged ? 2 : 1;
    const tall = wide ? 340 : 270;
    const layout = { height: wide ? tall : panels * tall, margin: { l: 44, r: 10, t: 30, b: 44 }, annotations: [] };
    const widest = panels === 1 ? 840 : undefined;
    const shown = figure.lines.filter((line) => on(line.series));
    for (let panel = 0; panel < panels; panel++) {
      const [x, y] = place(panel, panels, wide, 0.09, 74, layout);
      const name = panel ? panel + 1 : "";
      layout[`xaxis${name}`] = axis({ domain: x, anchor: `y${panel + 1}`, title: { text: "tasks seen", standoff: 8, font: { size: 12 } }, dtick: Math.ceil(figure.lines[0].mean.length / 10), showgrid: false, range: [0.85, figure.lines[0].mean.length + 0.15] });
      layout[`yaxis${name}`] = axis({ domain: y, anchor: `x${panel + 1}`, nticks: 6, automargin: true, range: panel ? figure.enlarged : fitted(shown, figure.most ?? Infinity) });
      const text = panel ? "enlarged: the better half of the methods" : figure.title;
      layout.annotations.push({ text, xref: "paper", yref: "paper", x: x[0], y: y[1], xanchor: "left", yanchor: "bottom", yshift: 6, showarrow: false, font: { color: css("--soft") } });
    }
    return [[...Array(panels).keys()].flatMap((panel) => curveTraces(figure, panel)), layout, widest];
  }

  // What is shown decides the range, so that switching methods off brings the others apart.
  function fitted(lines, most) {
    const values = lines.flatMap((line) => [
      ...line.mean.flatMap((mean, t) => (mean === null ? [] : [mean - (line.sd[t] ?? 0), Math.min(most, mean + (line.sd[t] ?? 0))])),
      ...(on("published") && line.published ? line.published : []),
    ]);
    if (!values.length) return [0, Number.isFinite(most) ? most : 1];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const margin = Math.max(0.05 * (high - low), 0.05);
    return [low - margin, high + margin];
  }

  // Where an axis of measures begins and ends: the worst methods do not rule it. A measure that is better the smaller it
  // is ends at three times the median, on both sides of 0; a score begins where the distance from the best is four times the median.
  function ends(figure, values) {
    const [low, high] = [Math.min(...values.map((v) => v.mean - (v.sd ?? 0))), Math.max(...values.map((v) => v.mean + (v.sd ?? 0)))];
    const means = values.map((v) => v.mean);
    if (figure.score) {
      const best = Math.max(...means);
      const far = 4 * middle(means.map((mean) => best - mean));
      const start = far > 0 && Math.min(...means) < best - far ? best - far : low;
      return [start - 0.05 * (high - start || 1), high + 0.05 * (high - start || 1), start, Infinity];
    }
    const limit = 3 * middle(means);
    const end = limit > 0 && limit < Math.max(...means) ? limit : Infinity;
    const start = limit > 0 && -limit > Math.min(...means) ? -limit : -Infinity;
    const right = Math.min(end, high);
    const left = Math.max(start, Math.min(0, low));
    return [left - 0.03 * (right - left || 1), right + 0.06 * (right - left || 1), start, end];
  }

  function measures(figure, wide) {
    const rows = figure.lines.filter((line) => on(line.series));
    const measured = [...figure.measures.keys()].filter((m) => rows.some((line) => line.values[m] !== null));
    const panels = measured.length;
    // side by side, the panels share their rows; one below the other, each has the methods that it measured
    const listed = measured.map((m) => (wide ? rows : rows.filter((line) => line.values[m] !== null)));
    const tall = 60 + 24 * Math.max(1, ...listed.map((some) => some.length));
    const layout = { height: wide ? tall : Math.max(1, panels) * tall, margin: { l: 44, r: 10, t: 6, b: 44 } };
    const traces = [];
    measured.forEach((m, panel) => {
      const name = figure.measures[m];
      const [x, y] = place(panel, panels, wide, 0.04, 50, layout);
      const suffix = panel ? panel + 1 : "";
      const [left, right, low, high] = ends(figure, rows.map((line) => line.values[m]).filter((value) => value !== null));
      layout[`xaxis${suffix}`] = axis({ domain: x, anchor: `y${panel + 1}`, title: { text: name, standoff: 6, font: { size: 12 } }, nticks: 5, range: [left, right] });
      layout[`yaxis${suffix}`] = axis({
        domain: y, anchor: `x${panel + 1}`, range: [tall / 24 - 2.9, -0.6], tickvals: listed[panel].map((_, i) => i), ticktext: listed[panel].map((line) => label(line.series, wide ? 40 : 20)),
        showticklabels: !(wide && panel), automargin: true, showline: false, ticks: "", zeroline: false,
      });
      listed[panel].forEach((line, i) => {
        const value = line.values[m];
        if (value === null) return;
        const axes = { xaxis: `x${panel + 1}`, yaxis: `y${panel + 1}`, meta: line.series };
        const beyond = value.mean > high ? 1 : value.mean < low ? -1 : 0;
        const text = `${label(line.series)}<br>${name}: ${spread(value.mean, value.sd, 3)}`;
        if (beyond) { // an arrow at the edge, and the number
          const at = { ...axes, x: [beyond > 0 ? right - 0.02 * (right - left) : left + 0.02 * (right - left)], y: [i] };
          traces.push({ ...at, mode: "markers", hoverinfo: "text", text: [text], marker: { symbol: beyond > 0 ? "triangle-right" : "triangle-left", size: 9, color: color(line.series) } });
          const number = value.mean.toPrecision(3).replace("-", "\u2212");
          const shown = beyond > 0 ? `${number}\u2002` : `\u2002${number}`;
          traces.push({ ...at, mode: "text", hoverinfo: "skip", text: [shown], textposition: beyond > 0 ? "middle left" : "middle right", textfont: { size: 11, color: css("--ink") } });
          return;
        }
        traces.push({ ...axes, x: value.seeds, y: value.seeds.map(() => i), mode: "markers", hoverinfo: "skip", marker: { symbol: "line-ns-open", size: 9, color: color(line.series), opacity: 0.6, line: { width: 1.5, color: color(line.series) } } });
        traces.push({
          ...axes, x: [value.mean], y: [i], mode: "markers", marker: marker(line.series, 9), hoverinfo: "text", text: [text],
          error_x: { array: [value.sd ?? 0], color: color(line.series), thickness: 1.8, width: 0 },
        });
      });
    });
    return [traces, layout];
  }

  // How often predictions are right against how sure they are.
  function reliability(figure, wide) {
    const every = figure.lines.filter((line) => on(line.series));
    const bright = focus(every);
    const layout = { height: wide ? 400 : 320, margin: { l: 44, r: 10, t: 30, b: 44 }, annotations: [] };
    layout.xaxis = axis({ range: figure.range, nticks: 8, showgrid: false, title: { text: "probability of the predicted class (%)", standoff: 8, font: { size: 12 } } });
    layout.yaxis = axis({ range: [0, 103], nticks: 6, automargin: true });
    layout.annotations.push({ text: "right predictions (%)", xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 6, showarrow: false, font: { color: css("--soft") } });
    layout.shapes = [{ type: "line", x0: 0, y0: 0, x1: 100, y1: 100, line: { color: css("--soft"), width: 1, dash: "4px,3px" } }];
    const traces = every.toReversed().map((line) => {
      const text = line.confidence.map((p, i) => `${label(line.series)}<br>${p.toFixed(1)} % sure: ${line.accuracy[i].toFixed(1)} % right<br>${line.share[i].toFixed(1)} % of the predictions`);
      const data = { x: line.confidence, y: line.accuracy, text };
      if (!bright.has(line.series)) return { ...thin(line), ...data };
      const look = marker(line.series, 9);
      const size = line.share.map((share) => 4 + 0.9 * Math.sqrt(share));
      return { ...data, meta: line.series, mode: "lines+markers", line: { color: color(line.series), width: 1.6 }, hoverinfo: "text", marker: { ...look, size } };
    });
    return [traces, layout, 640];
  }

  // The score against what a method keeps.
  function memory(figure, wide) {
    const rows = figure.lines.filter((line) => on(line.series));
    // with many points, only those have names that no other beats in both score and size
    const beaten = (line) => rows.some((one) => one !== line && one.kept <= line.kept && one.mean >= line.mean);
    const layout = { height: wide ? 380 : 320, margin: { l: 44, r: 16, t: 30, b: 44 }, annotations: [] };
    const [low, high, start] = rows.length ? ends({ score: true }, rows) : [0, 1, 0];
    const sizes = rows.map((line) => Math.log10(line.kept));
    const round = [-4, -3, -2, -1, 0, 1, 2, 3, 4].flatMap((power) => [1, 2, 5].map((first) => Number(`${first}e${power}`)));
    const inside = round.filter((one) => Math.min(...sizes) <= Math.log10(one) && Math.log10(one) <= Math.max(...sizes));
    const ticks = inside.length > 1 ? inside : [Math.min(...sizes), Math.max(...sizes)].map((one) => Number((10 ** one).toPrecision(2)));
    const gap = 0.12 * (Math.max(...sizes) - Math.min(...sizes)) + 0.05;
    layout.xaxis = axis({ type: "log", range: rows.length ? [Math.min(...sizes) - gap, Math.max(...sizes) + 2 * gap] : [0, 1], tickvals: ticks, ticktext: ticks.map((one) => String(one)), showgrid: false, title: { text: "kept after the last task (MB, logarithmic)", standoff: 8, font: { size: 12 } } });
    layout.yaxis = axis({ range: [low, high], nticks: 6, automargin: true });
    layout.annotations.push({ text: figure.title, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 6, showarrow: false, font: { color: css("--soft") } });
    // a name goes to the left of its point if there is a point with a name to the right, at nearly the same place
    const across = Math.max(...sizes) - Math.min(...sizes) + 3 * gap;
    const near = (one, line) => Math.abs(Math.log10(one.kept / line.kept)) < 0.06 * across && Math.abs(one.mean - line.mean) < 0.06 * (high - low);
    const traces = rows.map((line, i) => {
      const beyond = line.mean < start;
      const side = rows.slice(0, i).some((one) => near(one, line)) ? "middle left" : "middle right";
      const named = rows.length <= (wide ? 6 : 4) || !beaten(line);
      const number = beyond ? ` ${line.mean.toFixed(1)}` : "";
      return {
        meta: line.series, x: [line.kept], y: [beyond ? low + 0.03 * (high - low) : line.mean], mode: named || beyond ? "markers+text" : "markers", cliponaxis: false, hoverinfo: "text",
        hovertext: [`${label(line.series)}<br>${spread(line.mean, line.sd, 2)}<br>${line.kept.toPrecision(3)} MB`],
        text: [(named ? label(line.series) : "") + number], textposition: side, textfont: { size: 11, color: css("--ink") },
        marker: beyond ? { ...marker(line.series, 9), symbol: "triangle-down" } : marker(line.series, 9),
        error_y: beyond ? undefined : { array: [line.sd ?? 0], color: color(line.series), thickness: 1.2, width: 0 },
      };
    });
    return [traces, layout, 840];
  }

  // Measures over the rows of a stream, one panel below the other; alarms are triangles below the lines of the first.
  function streams(figure, wide) {
    const panels = figure.measures.length;
    const tall = wide ? 230 : 220;
    const layout = { height: 60 + panels * tall, margin: { l: 44, r: 10, t: 30, b: 44 }, annotations: [], shapes: [] };
    const shown = figure.lines.filter((line) => on(line.series));
    const bright = focus(shown);
    const traces = [];
    figure.measures.forEach((name, panel) => {
      const [x, y] = place(panel, panels, false, 0, 34, layout);
      const suffix = panel ? panel + 1 : "";
      const last = panel === panels - 1;
      layout[`xaxis${suffix}`] = axis({ domain: x, anchor: `y${panel + 1}`, nticks: wide ? 10 : 5, tickformat: ",", showgrid: false, showticklabels: last, matches: panel ? "x" : undefined, title: last ? { text: "rows", standoff: 8, font: { size: 12 } } : undefined });
      layout[`yaxis${suffix}`] = axis({ domain: y, anchor: `x${panel + 1}`, nticks: 5, automargin: true });
      layout.annotations.push({ text: name, xref: "paper", yref: "paper", x: x[0], y: y[1], xanchor: "left", yanchor: "bottom", yshift: 4, showarrow: false, font: { color: css("--soft") } });
      for (const row of figure.changes) layout.shapes.push({ type: "line", xref: `x${suffix}`, yref: "paper", x0: row, x1: row, y0: y[0], y1: y[1], line: { color: css("--soft"), width: 1, dash: "4px,3px" } });
      const axes = { xaxis: `x${panel + 1}`, yaxis: `y${panel + 1}` };
      for (const line of shown.toReversed()) {
        const [mean, sd] = [line.mean[panel], line.sd[panel]];
        const known = mean.flatMap((value, i) => (value === null ? [] : [i]));
        const text = known.map((i) => `${label(line.series)}<br>up to row ${line.rows[i].toLocaleString("en")}: ${spread(mean[i], sd[i], 3)}`);
        if (!bright.has(line.series)) {
          traces.push({ ...axes, ...thin(line), x: known.map((i) => line.rows[i]), y: known.map((i) => mean[i]), text });
          continue;
        }
        if (known.length > 1 && sd[known[0]] !== null) {
          const ends = known.map((i) => line.rows[i]);
          traces.push({
            ...axes, meta: line.series, x: [...ends, ...ends.toReversed()], mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faint(color(line.series), 0.13), hoverinfo: "skip",
            y: [...known.map((i) => mean[i] + sd[i]), ...known.toReversed().map((i) => mean[i] - sd[i])],
          });
        }
        traces.push({
          ...axes, meta: line.series, x: known.map((i) => line.rows[i]), y: known.map((i) => mean[i]), mode: "lines", line: { color: color(line.series), width: 1.8 }, hoverinfo: "text", text,
        });
      }
      const [low, high] = better(shown, panel, figure.better[panel]);
      layout[`yaxis${suffix}`].range = [low - 0.05 * (high - low), high + 0.05 * (high - low)];
      if (panel) return;
      const step = 0.07 * (high - low || 1);
      const warned = shown.filter((line) => line.alarms.length);
      warned.forEach((line, i) => traces.push({
        ...axes, meta: line.series, x: line.alarms.map((alarm) => alarm.row), y: line.alarms.map(() => low - (i + 1) * step), mode: "markers", hoverinfo: "text",
        marker: { symbol: "triangle-up", size: 9, color: color(line.series), line: { width: 1, color: css("--back") } },
        text: line.alarms.map((alarm) => `${label(line.series)}: alarm<br>row ${alarm.row.toLocaleString("en")}${alarm.columns.length ? "<br>" + plain(alarm.columns.join(", ")) : ""}`),
      }));
      layout.yaxis.range = [low - (warned.length + 1) * step, high + step];
    });
    return [traces, layout];
  }

  // The range of the better half of a stream's lines, and as much again on either side if there is something there.
  function better(lines, panel, sign) {
    const known = lines.map((line) => line.mean[panel].filter((value) => value !== null)).filter((values) => values.length);
    if (!known.length) return [0, 1];
    const mean = (values) => values.reduce((a, b) => a + b) / values.length;
    const half = known.toSorted((a, b) => sign * (mean(b) - mean(a))).slice(0, Math.ceil((known.length + 1) / 2)).flat();
    const [low, high, all] = [Math.min(...half), Math.max(...half), known.flat()];
    const found = [Math.max(Math.min(...all), 2 * low - high), Math.min(Math.max(...all), 2 * high - low)];
    return found[0] < found[1] ? found : [low - 0.5, high + 0.5];
  }

  // Side by side on a wide screen, one below the other on a narrow one: [x domain, y domain]. `down` is in pixels.
  function place(panel, panels, wide, across, down, layout) {
    const gap = wide ? across : down / (layout.height - layout.margin.t - layout.margin.b);
    const size = (1 - gap * (panels - 1)) / panels;
    const from = panel * (size + gap);
    return wide ? [[from, from + size], [0, 1]] : [[0, 1], [Math.max(0, 1 - from - size), 1 - from]];
  }

  function axis(more) {
    return { gridcolor: css("--line"), linecolor: css("--soft"), showline: true, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: css("--soft"), fixedrange: true, ...more };
  }

  const KINDS = { curves, measures, reliability, memory, stream: streams };

  function draw(plot) {
    const figure = data.figures[plot.dataset.figure];
    const wide = plot.clientWidth >= 620;
    const family = getComputedStyle(document.body).fontFamily;
    const [traces, more, widest] = KINDS[figure.kind](figure, wide);
    const layout = {
      width: Math.min(plot.clientWidth, widest ?? Infinity), showlegend: false, dragmode: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family, size: 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { family, color: css("--ink") }, align: "left" }, ...more,
    };
    plot.style.minHeight = `${layout.height}px`;
    return Plotly.react(plot, traces, layout, { displayModeBar: false, doubleClick: false });
  }

  // Figures are drawn when they come near the window, so that a page with many of them opens at once.
  const waiting = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) drawOnce(entry.target);
  }, { rootMargin: "600px 0px" });

  function drawOnce(plot) {
    if (!ready || !waiting.has(plot) || !plot.clientWidth) return; // one that is folded away or hidden has no width
    waiting.delete(plot);
    watcher.unobserve(plot);
    draw(plot);
    document.documentElement.dataset.drawn = plots.length - waiting.size;
  }

  function show() {
    for (const part of document.querySelectorAll("[data-series]")) {
      part.hidden = !part.dataset.series.split(" ").every(on);
    }
    const methods = switches.filter((box) => box.dataset.switch !== "published");
    const count = methods.filter((box) => box.checked).length;
    status.textContent = `${count} of ${methods.length} methods shown`;
    for (const part of document.querySelectorAll("[data-any]")) {
      part.hidden = !part.dataset.any.trim().split(" ").some(on);
      const shown = part.dataset.any.trim().split(" ").filter(on);
      const note = part.querySelector(".others");
      if (!note) continue;
      note.hidden = shown.length <= MANY;
      const bright = focus(data.figures[part.querySelector(".plot").dataset.figure].lines.filter((line) => on(line.series)));
      for (const item of part.querySelectorAll(".key li")) item.classList.toggle("faint", !bright.has(Number(item.dataset.series)));
    }
    for (const part of document.querySelectorAll("main > section:not([data-any])")) part.hidden = !count;
    document.querySelector(".nothing").hidden = count > 0;
    if (ready) redraw();
  }

  function redraw() {
    for (const name in theme) delete theme[name];
    const heights = plots.map((plot) => {
      const figure = data.figures[plot.dataset.figure];
      return KINDS[figure.kind](figure, plot.clientWidth >= 620)[1].height;
    });
    plots.forEach((plot, i) => {
      plot.style.minHeight = `${heights[i]}px`; // so that nothing moves when it is drawn
      waiting.add(plot);
    });
    const near = plots.map((plot) => plot.getBoundingClientRect()).map(({ top, bottom }) => bottom > -200 && top < innerHeight + 200);
    plots.forEach((plot, i) => {
      if (near[i]) drawOnce(plot);
      if (waiting.has(plot)) watcher.observe(plot);
    });
  }

  async function load() {
    const text = atob(document.getElementById("plotly").textContent);
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
    ready = true;
    redraw();
    document.documentElement.dataset.ready = "";
  }

  // A column is sorted by a button in its head: first the largest numbers, or texts from a to z.
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const first = [...body.rows];
    const value = (row, i) => row.cells[i].textContent.trim().replace("\u2212", "-").replace(/,(?=\d{3})/g, "");
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const numbers = first.every((row) => value(row, i) === "-" || /^[-+]?\d+(\.\d+)?([^\d-].*)?$/.test(value(row, i)));
        const turns = numbers ? ["none", "descending", "ascending"] : ["none", "ascending", "descending"];
        const now = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
        for (const one of heads) one.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", now);
        const sign = now === "ascending" ? 1 : -1;
        const order = now === "none" ? first : first.toSorted((a, b) => {
          const [x, y] = [value(a, i), value(b, i)];
          if (x === "-" || y === "-") return (x === "-") - (y === "-"); // what was not measured comes last
          return sign * (numbers ? parseFloat(x) - parseFloat(y) : x.localeCompare(y));
        });
        body.append(...order);
      });
    });
  }

  for (const box of switches) box.addEventListener("change", show);
  for (const button of document.querySelectorAll("[data-all]")) {
    button.addEventListener("click", () => {
      for (const box of switches) if (box.dataset.switch !== "published") box.checked = button.dataset.all === "on";
      show();
    });
  }
  dark.addEventListener("change", show);
  for (const table of document.querySelectorAll("table.wide")) sortable(table);
  addEventListener("beforeprint", () => { for (const plot of [...waiting]) drawOnce(plot); });
  let pause, width = innerWidth;
  addEventListener("resize", () => {
    clearTimeout(pause);
    if (width !== innerWidth) pause = setTimeout(() => { width = innerWidth; show(); }, 120);
  });
  const wideScreen = matchMedia("(min-width: 64rem)");
  const fold = () => { document.querySelector(".switches").open = wideScreen.matches; };
  wideScreen.addEventListener("change", fold);
  fold();
  show();
  const first = () => new Promise((next) => requestAnimationFrame(() => setTimeout(next))); // the tables come first
  first().then(load).catch(() => {
    for (const plot of plots) plot.textContent = "This browser cannot draw the figure. The tables below hold its numbers.";
  });
})();
