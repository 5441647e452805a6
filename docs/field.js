// Filters of the table of methods. Without this file, the page shows the whole table.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("field-filters");
  const table = document.querySelector("#field-filters ~ .md-typeset__scrollwrap table, #field-filters ~ table");
  if (!place || !table) return;
  const column = Object.fromEntries([...table.tHead.rows[0].cells].map((cell, i) => [cell.textContent.trim(), i]));
  const text = (row, name) => row.cells[column[name]].textContent.trim();
  const number = (row, name) => parseFloat(text(row, name));
  const filters = {
    Scenario: {
      "the task is given": (row) => text(row, "scenarios").includes("task"),
      "the task is not given": (row) => text(row, "scenarios").includes("domain"),
      "not given, and new classes come": (row) => text(row, "scenarios").includes("class"),
    },
    Memory: {
      "no examples": (row) => !text(row, "keeps").includes("examples"),
      "no examples, no growth with tasks": (row) => !/examples|task/.test(text(row, "keeps")),
      "examples may be kept": (row) => text(row, "keeps").includes("examples"),
    },
    Cost: {
      "steps as fast as naive ones (to 1.5×)": (row) => number(row, "step") <= 1.5,
      "up to 3× a naive step": (row) => number(row, "step") <= 3,
    },
    Uncertainty: { "with uncertainty": (row) => text(row, "uncertainty") === "yes" },
  };
  const rows = [...table.tBodies[0].rows];
  const count = document.createElement("p");
  count.setAttribute("role", "status");
  const chosen = Object.entries(filters).map(([name, tests]) => {
    const label = document.createElement("label");
    const select = document.createElement("select");
    for (const option of ["any", ...Object.keys(tests)]) select.add(new Option(option));
    label.append(`${name} `, select);
    place.append(label);
    select.addEventListener("change", show);
    return () => tests[select.value];
  });
  place.append(count);
  function show() {
    const tests = chosen.map((get) => get()).filter(Boolean);
    for (const row of rows) row.hidden = !tests.every((test) => test(row));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} methods`;
  }
  show();
});
