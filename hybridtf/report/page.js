"use strict";
// Draws the charts over their still pictures, with tooltips, and offers the records as a file.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  const draw = async (figure, spec) => {
    const still = figure.querySelector(".drawing");
    const live = document.createElement("div");
    live.className = "drawing live";
    still.before(live);
    try {
      await vegaEmbed(live, spec, { actions: false, ast: true, renderer: "svg", logLevel: 1, tooltip: { theme: "custom" } });
      still.remove();
    } catch (error) {
      live.remove(); // the still picture stays
      console.error(error);
    }
  };

  const specs = read("chart-specs");
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    draw(figure, specs[figure.dataset.chart]);
  }

  const button = document.getElementById("download");
  button.hidden = false;
  button.addEventListener("click", () => {
    const lines = read("records").map((record) => JSON.stringify(record) + "\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    link.download = "records.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // Everything that is folded away is on paper.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));
})();
