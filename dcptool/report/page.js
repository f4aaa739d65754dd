"use strict";
(function () {
  var tip = document.getElementById("tip");
  function show(mark, x, y) {
    tip.textContent = mark.getAttribute("data-tip");
    tip.hidden = false;
    var box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 4)) + "px";
    tip.style.top = (y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16) + "px";
  }
  function hide() { tip.hidden = true; }
  document.querySelectorAll("[data-tip]").forEach(function (mark) {
    // The browser's own hint would cover ours.
    var title = mark.querySelector(":scope > title");
    if (title) { title.remove(); }
    mark.addEventListener("pointermove", function (event) { show(mark, event.clientX, event.clientY); });
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", function () {
      if (!mark.matches(":focus-visible")) { return; }
      var box = mark.getBoundingClientRect();
      show(mark, box.left + box.width / 2, box.top + box.height / 2);
    });
    mark.addEventListener("blur", hide);
  });
  addEventListener("keydown", function (event) { if (event.key === "Escape") { hide(); } });
  // What is folded away on the screen belongs on paper.
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (part) { part.open = true; });
  });
  function value(row, column) {
    var cell = row.cells[column];
    var text = cell.hasAttribute("data-value") ? cell.getAttribute("data-value") : cell.textContent.trim();
    var number = parseFloat(text);
    return { text: text, number: text !== "" && isFinite(text) ? number : null };
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    Array.from(table.tHead.rows[0].cells).forEach(function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending";
        Array.from(head.parentNode.cells).forEach(function (one) { one.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        var rows = Array.from(table.tBodies[0].rows).map(function (row) { return [value(row, column), row]; });
        rows.sort(function (a, b) {
          var both = a[0].number !== null && b[0].number !== null;
          var order = both ? a[0].number - b[0].number : a[0].text.localeCompare(b[0].text, undefined, { numeric: true });
          return down ? -order : order;
        });
        rows.forEach(function (pair) { table.tBodies[0].appendChild(pair[1]); });
      });
    });
  });
})();
