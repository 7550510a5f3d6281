// Runs before the first paint, so that a theme that was chosen by hand never flashes in the other one.
try {
  document.documentElement.dataset.theme = localStorage.getItem("parlay-theme") ?? "";
} catch {
  // This browser keeps nothing for the page: the system's theme it is.
}
