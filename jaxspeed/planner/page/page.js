"use strict";
// The theme: the system's preference, until the button overrides it.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const other = () => (now() === "dark" ? "light" : "dark");
  const name = () => { button.textContent = other(); button.setAttribute("aria-label", `${other()} colours`); };
  button.addEventListener("click", () => { root.dataset.theme = other(); name(); });
  dark.addEventListener("change", name);
  name();
})();
// Tooltips on hover, tap and keyboard focus.
(() => {
  const tip = document.getElementById("tip");
  let shown = null;
  const hide = () => { tip.style.display = "none"; shown = null; };
  const show = (part) => {
    shown = part;
    tip.textContent = part.dataset.tip;
    tip.style.display = "block";
    const at = part.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const left = Math.max(12, Math.min(at.left + at.width / 2 - own.width / 2, wide - own.width - 12));
    const above = at.top - own.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  const over = (event) => {
    const part = event.target instanceof Element && event.target.closest("[data-tip]");
    if (part) show(part); else hide();
  };
  document.addEventListener("pointerover", over);
  document.addEventListener("focusin", over);
  document.addEventListener("focusout", hide);
  // Focus scrolls the page: the tooltip follows the focused element.
  const moved = () => { if (shown && shown === document.activeElement) show(shown); else hide(); };
  document.addEventListener("scroll", moved, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
