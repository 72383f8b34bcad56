/* What the pages do better with JavaScript: keys, copying, questions in a dialog, tokens by arrow. Everything else is links and forms. */
(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const dialog = document.getElementById("dialog");

  /* Nothing is asked for while nobody looks, while something is being picked, or while text is being selected. */
  document.addEventListener("htmx:beforeRequest", (event) => {
    const target = event.detail.elt;
    const picking = target.querySelector("input:checked") || (target.contains(document.activeElement) && document.activeElement.matches("input, select"));
    const selection = document.getSelection();
    const selecting = selection && !selection.isCollapsed && target.contains(selection.anchorNode);
    if (document.hidden || picking || selecting) event.preventDefault();
  });
  /* What was unfolded stays unfolded, and what had the focus keeps it. */
  let unfolded = [], focused = null;
  document.addEventListener("htmx:beforeSwap", (event) => {
    unfolded = all("details[open][id]", event.detail.target).map((each) => each.id);
    const active = document.activeElement;
    focused = event.detail.target.contains(active) && active.href ? active.getAttribute("href") : null;
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    unfolded.forEach((id) => { const each = document.getElementById(id); if (each) each.open = true; });
    if (focused) { const again = all("a[href]", event.detail.target).find((each) => each.getAttribute("href") === focused); if (again) again.focus({ preventScroll: true }); }
    mark(row);
  });

  /* A page's part in a dialog; where that fails, the page itself. */
  async function show(url, part) {
    try {
      const answer = await fetch(url, { credentials: "same-origin" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const found = answer.ok && page.querySelector(part);
      if (!found) throw new Error("no such part");
      dialog.replaceChildren(found);
      dialog.showModal();
    } catch { location.href = url; }
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a, button");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (link.matches("a[data-ask]")) { event.preventDefault(); show(link.href, "#confirm"); }
    else if (link.matches("a[data-help]")) { event.preventDefault(); show(link.href, "#help"); }
    else if (link.matches("a[data-close]") && dialog.open) { event.preventDefault(); dialog.close(); }
    else if (link.matches("[data-copy]")) {
      const done = () => { link.classList.add("done"); setTimeout(() => link.classList.remove("done"), 1200); };
      if (navigator.clipboard) navigator.clipboard.writeText(link.dataset.copy).then(done);
      else { const area = document.createElement("textarea"); area.value = link.dataset.copy; document.body.append(area); area.select(); document.execCommand("copy"); area.remove(); done(); }
    }
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  /* Keys. */
  let row = -1, going = 0;
  const rows = () => all("tr[data-row]");
  function mark(place) { rows().forEach((each, number) => each.classList.toggle("here", number === place)); }
  function move(by) {
    const found = rows();
    if (!found.length) return;
    row = Math.max(0, Math.min(found.length - 1, row + by));
    mark(row);
    const link = found[row].querySelector("a");
    if (link) link.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.matches("input:not([type=checkbox]), select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.timeStamp - going < 1500 && going) {
      going = 0;
      const link = document.querySelector(`a[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); location.href = link.href; return; }
    }
    const follow = (name) => { const link = all(`a[data-page="${name}"]`)[0]; if (link) location.href = link.href; };
    if (event.key === "g") going = event.timeStamp;
    else if (event.key === "?") { const link = document.querySelector("a[data-help]"); if (link) show(link.href, "#help"); }
    else if (event.key === "/") { const find = document.getElementById("find"); if (find) { event.preventDefault(); find.focus(); find.select(); } }
    else if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "]") follow("next");
    else if (event.key === "[") follow("prev");
  });

  /* Tokens: one at a time under the arrows, its details in words below. */
  const stream = document.getElementById("stream"), told = document.getElementById("token");
  if (stream && told) {
    const tokens = stream.getElementsByClassName("t");
    let at = -1;
    const choose = (place, scroll) => {
      if (place < 0 || place >= tokens.length) return;
      if (at >= 0) tokens[at].classList.remove("at");
      at = place;
      tokens[at].classList.add("at");
      told.textContent = `${JSON.stringify(tokens[at].textContent.replace("⏎", ""))}  ${tokens[at].title}`;
      if (scroll) tokens[at].scrollIntoView({ block: "nearest" });
    };
    stream.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: tokens.length - 1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(tokens.length - 1, steps[event.key])), true);
    });
    stream.addEventListener("focus", () => { if (at < 0) choose(0, false); });
    stream.addEventListener("mouseover", (event) => { const token = event.target.closest(".t"); if (token) choose([...tokens].indexOf(token), false); });
  }
})();
