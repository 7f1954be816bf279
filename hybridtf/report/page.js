"use strict";
// Draws the charts over their still pictures, sorts tables, opens the records that numbers lead to, and gives them as a file.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  let kept = null;
  const records = () => (kept ??= read("records"));

  // -- charts --------------------------------------------------------------------------------------------------------

  const draw = async (figure, spec) => {
    const still = figure.querySelector(".drawing");
    const live = document.createElement("div");
    live.className = "drawing live";
    still.before(live);
    try {
      await vegaEmbed(live, spec, { actions: false, ast: true, renderer: "svg", logLevel: 1, tooltip: { theme: "custom" } });
      still.remove();
      figure.dataset.live = "yes";
    } catch (error) {
      live.remove(); // the still picture stays
      console.error(error);
    }
  };

  const specs = read("chart-specs");
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    draw(figure, specs[figure.dataset.chart]);
  }
  for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;

  // -- tables --------------------------------------------------------------------------------------------------------

  const value = (cell, numeric) => {
    if (!numeric) return cell.textContent.trim();
    return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
  };

  const sort = (table, column, way) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === column && way ? (way > 0 ? "ascending" : "descending") : "none"));
    const numeric = heads[column].classList.contains("number");
    const order = (a, b) => {
      if (!way) return a.dataset.first - b.dataset.first;
      const [x, y] = [a, b].map((row) => value(row.cells[column], numeric));
      if (x === null || y === null) return (x === null) - (y === null); // what has no number is last either way
      return way * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    };
    body.append(...[...body.rows].sort(order));
  };

  const choice = (table, names) => {
    const label = document.createElement("label"), select = document.createElement("select");
    label.className = "order";
    label.append("Order: ", select);
    select.add(new Option("as measured", "0 0"));
    names.forEach((name, i) => {
      select.add(new Option(`${name}, rising`, `${i} 1`));
      select.add(new Option(`${name}, falling`, `${i} -1`));
    });
    select.addEventListener("change", () => sort(table, ...select.value.split(" ").map(Number)));
    table.parentElement.before(label);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tBodies[0].rows].forEach((row, i) => { row.dataset.first = i; });
    const heads = [...table.tHead.rows[0].cells];
    if (table.classList.contains("cards")) choice(table, heads.map((head) => head.textContent)); // a phone shows no heads
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        sort(table, column, now === "none" ? 1 : now === "ascending" ? -1 : 0);
      });
    });
  }

  // -- records -------------------------------------------------------------------------------------------------------

  for (const record of document.querySelectorAll("details.record")) {
    record.addEventListener("toggle", () => {
      record.querySelector("pre").textContent = JSON.stringify(records()[record.dataset.place], null, 1);
    }, { once: true });
  }

  const show = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
    target?.scrollIntoView();
  };
  addEventListener("hashchange", show);
  if (location.hash) show();

  const button = document.getElementById("download");
  button.hidden = false;
  button.addEventListener("click", () => {
    const lines = records().map((record) => JSON.stringify(record) + "\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    link.download = "records.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // -- paper ---------------------------------------------------------------------------------------------------------

  // Everything that is folded away is on paper, but for the records.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open], .record)")];
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));
})();
