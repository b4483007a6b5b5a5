// What the theme leaves out for readers with a keyboard or a screen reader.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const scrolling = () => {
    for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
      if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    }
  };
  addEventListener("resize", scrolling);
  // The theme wraps tables once it has started.
  new MutationObserver(scrolling).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
  scrolling();
});
