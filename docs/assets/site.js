// What the theme leaves out for readers with a keyboard or a screen reader.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const scrolling = () => {
    for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .formula")) {
      if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    }
  };
  // The theme puts the button that copies code into a landmark, so a page would have dozens, all without a name.
  const buttons = () => document.querySelectorAll("nav.md-code__nav").forEach(nav => nav.setAttribute("role", "group"));
  const mend = () => { scrolling(); buttons(); };
  addEventListener("resize", scrolling);
  // The theme wraps tables and adds buttons once it has started.
  new MutationObserver(mend).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
  mend();
});
