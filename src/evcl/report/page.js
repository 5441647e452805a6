"use strict";
// Draws the figures of the page from its data, in the colours of the reader's theme, and lets methods be switched off.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const switches = [...document.querySelectorAll("[data-switch]")];
  const status = document.getElementById("shown");
  let ready = false;

  const on = (name) => switches.find((box) => box.dataset.switch === String(name))?.checked ?? true;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (series) => data.series[series][dark.matches ? "dark" : "light"];
  const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
  // plotly reads a little HTML in texts; a name is only a name
  const plain = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const label = (series) => plain(data.series[series].label);
  const spread = (value, sd, digits) => value.toFixed(digits) + (sd === null ? "" : ` ± ${sd.toFixed(digits)}`);
  const marker = (series, size) => {
    const one = data.series[series];
    return { symbol: one.symbol, size: size * Math.sqrt(one.size), color: color(series), line: { width: 1, color: css("--back") } };
  };

  function curveTraces(figure, panel) {
    const axes = { xaxis: `x${panel + 1}`, yaxis: `y${panel + 1}` };
    const traces = [];
    const tasks = figure.lines[0].mean.map((_, t) => t + 1);
    const shown = figure.lines.filter((line) => on(line.series));
    for (const line of shown) {
      const known = tasks.filter((t) => line.mean[t - 1] !== null);
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

  function measures(figure, wide) {
    const rows = figure.lines.filter((line) => on(line.series));
    const measured = [...figure.measures.keys()].filter((m) => rows.some((line) => line.values[m] !== null));
    const panels = measured.length;
    const tall = 60 + 24 * Math.max(1, rows.length);
    const layout = { height: wide ? tall : Math.max(1, panels) * tall, margin: { l: 44, r: 10, t: 6, b: 44 } };
    const traces = [];
    measured.forEach((m, panel) => {
      const name = figure.measures[m];
      const [x, y] = place(panel, panels, wide, 0.04, 50, layout);
      const suffix = panel ? panel + 1 : "";
      layout[`xaxis${suffix}`] = axis({ domain: x, anchor: `y${panel + 1}`, title: { text: name, standoff: 6, font: { size: 12 } }, nticks: 5, rangemode: "tozero", zeroline: false });
      layout[`yaxis${suffix}`] = axis({
        domain: y, anchor: `x${panel + 1}`, range: [rows.length - 0.4, -0.6], tickvals: rows.map((_, i) => i), ticktext: rows.map((line) => label(line.series)),
        showticklabels: !(wide && panel), automargin: true, showline: false, ticks: "", zeroline: false,
      });
      rows.forEach((line, i) => {
        const value = line.values[m];
        if (value === null) return;
        const axes = { xaxis: `x${panel + 1}`, yaxis: `y${panel + 1}`, meta: line.series };
        traces.push({ ...axes, x: value.seeds, y: value.seeds.map(() => i), mode: "markers", hoverinfo: "skip", marker: { symbol: "line-ns-open", size: 9, color: color(line.series), opacity: 0.6, line: { width: 1.5, color: color(line.series) } } });
        traces.push({
          ...axes, x: [value.mean], y: [i], mode: "markers", marker: marker(line.series, 9), hoverinfo: "text",
          text: [`${label(line.series)}<br>${name}: ${spread(value.mean, value.sd, 3)}`],
          error_x: { array: [value.sd ?? 0], color: color(line.series), thickness: 1.8, width: 0 },
        });
      });
    });
    return [traces, layout];
  }

  // Measures over the rows of a stream, one panel below the other; alarms are triangles below the lines of the first.
  function streams(figure, wide) {
    const panels = figure.measures.length;
    const tall = wide ? 230 : 220;
    const layout = { height: 60 + panels * tall, margin: { l: 44, r: 10, t: 30, b: 44 }, annotations: [], shapes: [] };
    const shown = figure.lines.filter((line) => on(line.series));
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
        if (known.length > 1 && sd[known[0]] !== null) {
          const ends = known.map((i) => line.rows[i]);
          traces.push({
            ...axes, meta: line.series, x: [...ends, ...ends.toReversed()], mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faint(color(line.series), 0.13), hoverinfo: "skip",
            y: [...known.map((i) => mean[i] + sd[i]), ...known.toReversed().map((i) => mean[i] - sd[i])],
          });
        }
        traces.push({
          ...axes, meta: line.series, x: known.map((i) => line.rows[i]), y: known.map((i) => mean[i]), mode: "lines", line: { color: color(line.series), width: 1.8 }, hoverinfo: "text",
          text: known.map((i) => `${label(line.series)}<br>up to row ${line.rows[i].toLocaleString("en")}: ${spread(mean[i], sd[i], 3)}`),
        });
      }
      if (panel) return;
      const values = shown.flatMap((line) => line.mean[0].filter((value) => value !== null));
      const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
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

  function draw(plot) {
    const figure = data.figures[plot.dataset.figure];
    const wide = plot.clientWidth >= 620;
    const family = getComputedStyle(document.body).fontFamily;
    const [traces, more, widest] = { curves, measures, stream: streams }[figure.kind](figure, wide);
    const layout = {
      width: Math.min(plot.clientWidth, widest ?? Infinity), showlegend: false, dragmode: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family, size: 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { family, color: css("--ink") }, align: "left" }, ...more,
    };
    plot.style.minHeight = "0";
    return Plotly.react(plot, traces, layout, { displayModeBar: false, doubleClick: false });
  }

  function show() {
    for (const part of document.querySelectorAll("[data-series]")) {
      part.hidden = !part.dataset.series.split(" ").every(on);
    }
    const methods = switches.filter((box) => box.dataset.switch !== "published");
    status.textContent = `${methods.filter((box) => box.checked).length} of ${methods.length} methods shown`;
    if (ready) plots.forEach(draw);
  }

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
    ready = true;
    for (const plot of plots) {
      await draw(plot);
      await new Promise((next) => setTimeout(next)); // the reader sees the first figures while the last are drawn
    }
    document.documentElement.dataset.drawn = plots.length;
  }

  for (const box of switches) box.addEventListener("change", show);
  for (const button of document.querySelectorAll("[data-all]")) {
    button.addEventListener("click", () => {
      for (const box of switches) if (box.dataset.switch !== "published") box.checked = button.dataset.all === "on";
      show();
    });
  }
  dark.addEventListener("change", show);
  let waiting, width = innerWidth;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    if (width !== innerWidth) waiting = setTimeout(() => { width = innerWidth; show(); }, 120);
  });
  const wideScreen = matchMedia("(min-width: 64rem)");
  const fold = () => { document.querySelector(".switches").open = wideScreen.matches; };
  wideScreen.addEventListener("change", fold);
  fold();
  show();
  load().catch(() => {
    for (const plot of plots) plot.textContent = "This browser cannot draw the figure. The tables below hold its numbers.";
  });
})();
