/** What modules of the page expect of a browser when they are loaded. */

Object.assign(globalThis, {
  location: { hash: "" },
  sessionStorage: { getItem: () => null, setItem: () => {}, removeItem: () => {} },
  addEventListener: () => {},
  document: { documentElement: { dataset: {} }, addEventListener: () => {}, hidden: false },
});
