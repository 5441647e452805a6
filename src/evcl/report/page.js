"use strict";
// Lets methods be switched off in every figure and table of the page, and tables be sorted.
(() => {
  const switches = [...document.querySelectorAll("[data-switch]")];
  const status = document.getElementById("shown");
  const MANY = 12; // with more methods than this, a figure has colours for the best few only
  const FEW = 8;

  const on = (name) => switches.find((box) => box.dataset.switch === String(name))?.checked ?? true;

  // The methods that a section draws in their colours: all, or the best few and the first.
  function focus(part) {
    const shown = part.dataset.any.trim().split(" ").filter(on);
    if (shown.length <= MANY) return new Set(shown);
    return new Set([shown[0], ...part.dataset.ranked.split(" ").filter(on).slice(0, FEW)]);
  }

  function show() {
    for (const part of document.querySelectorAll("[data-series]")) {
      part.toggleAttribute("hidden", !part.dataset.series.split(" ").every(on));
    }
    for (const part of document.querySelectorAll(".published")) {
      part.toggleAttribute("hidden", !on("published") || !on(part.dataset.series));
    }
    const methods = switches.filter((box) => box.dataset.switch !== "published");
    const count = methods.filter((box) => box.checked).length;
    status.textContent = `${count} of ${methods.length} methods shown`;
    for (const part of document.querySelectorAll("[data-any]")) {
      const bright = focus(part);
      part.hidden = !bright.size;
      for (const item of part.querySelectorAll(".key li, .focused [data-series]")) item.classList.toggle("faint", !bright.has(item.dataset.series));
      for (const note of part.querySelectorAll(".others")) note.hidden = !part.querySelector(".key .faint:not([hidden])");
    }
    for (const part of document.querySelectorAll("main > section:not([data-any])")) part.hidden = !count;
    document.querySelector(".nothing").hidden = count > 0;
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
  for (const table of document.querySelectorAll("table.wide")) sortable(table);
  const wideScreen = matchMedia("(min-width: 64rem)");
  const fold = () => { document.querySelector(".switches").open = wideScreen.matches; };
  wideScreen.addEventListener("change", fold);
  fold();
  show();
  document.documentElement.dataset.ready = "";
})();
