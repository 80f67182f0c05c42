// A click on a column's title sorts by that column's words, or first numbers; again: the other way round.
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const way = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentElement.children) other.ariaSort = null;
  head.ariaSort = way > 0 ? "ascending" : "descending";
  const text = row => row.cells[head.cellIndex].textContent;
  const number = row => parseFloat((text(row).replace(/[,\s×<±]/g, "").match(/^[-+]?[\d.]+/) || ["NaN"])[0]);
  body.append(...[...body.rows].sort((a, b) => {
    if (head.className) return way * text(a).localeCompare(text(b), "en", { numeric: true });
    const [x, y] = [number(a), number(b)];
    return isNaN(x) ? (isNaN(y) ? 0 : 1) : isNaN(y) ? -1 : way * (x - y);
  }));
};
