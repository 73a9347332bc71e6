"use strict";

// Keep a form, the settings and the page's address in step: show(settings) whenever one changes.
// options: {setting: what it may be, given those above it}, start: {setting: value}.
function play(id, options, start, show) {
  const form = document.getElementById(id);
  let now = {}, lists = {};
  function settle(wanted) {
    now = {};
    for (const [name, values] of Object.entries(options)) {
      const list = (lists[name] = values(now)), input = form.elements[name];
      const below = list.findLast((value) => value <= wanted[name]); // the nearest that exists
      now[name] = list.find((value) => `${value}` === `${wanted[name]}`) ?? below ?? list[0];
      input.disabled = list.length < 2;
      if (input.type === "checkbox") input.checked = now[name];
      else if (input.type === "range") {
        [input.max, input.value] = [list.length - 1, list.indexOf(now[name])];
        input.previousElementSibling.value = now[name]; // its <output>
        input.setAttribute("aria-valuetext", now[name]);
      } else input.replaceChildren(...list.map((v) => new Option(v, v, false, v === now[name])));
    }
    history.replaceState(null, "", `#${new URLSearchParams(now)}`);
    show(now);
  }
  form.addEventListener("input", ({ target: { name, type, checked, value } }) =>
    settle({ ...now, [name]: { checkbox: checked, range: lists[name][value] }[type] ?? value }),
  );
  const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  addEventListener("hashchange", () => settle({ ...start, ...read() }));
  settle({ ...start, ...read() });
  const small = matchMedia("(max-width: 60em)").matches; // bars stay in view there, without lists
  document.querySelectorAll(".figure").forEach((figure) => (figure.open = !small));
}
