(() => {
  "use strict";
  const at = (name) => document.getElementById("lt-" + name);
  const page = document.documentElement;
  const main = at("main");
  // Opening everything fires a thousand events; what follows from them is needed once.
  function oncePerFrame(work) {
    let waiting = false;
    return () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; work(); });
    };
  }

  // ---- Colours: automatic, dark, light; remembered where the browser lets a local file do so.
  const THEMES = { auto: "automatic", dark: "dark", light: "light" };
  function setTheme(theme) {
    page.dataset.theme = theme;
    const label = "Colours: " + THEMES[theme];
    at("theme").setAttribute("aria-label", label);
    at("theme").title = label;
    try { localStorage.setItem("logtree-theme", theme); } catch { /* storage is a convenience */ }
  }
  let stored = null;
  try { stored = localStorage.getItem("logtree-theme"); } catch { /* storage is a convenience */ }
  if (stored in THEMES) setTheme(stored);
  at("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(page.dataset.theme || "auto") + 1) % names.length]);
  });

  // ---- Folding
  const sectionSelector = "#lt-main section, #lt-main details.s, #lt-main details.x";
  const headingSelector = ":scope > :is(h1,h2,h3,h4,h5,h6), :scope > summary > :is(h1,h2,h3,h4,h5,h6)";
  function openAround(node) {
    const opened = [];
    for (let el = node.nodeType === 1 ? node : node.parentElement; el && el !== main; el = el.parentElement) {
      if (el.localName === "details" && !el.open) { el.open = true; opened.push(el); }
    }
    return opened;
  }
  function nameAll() {
    at("all").textContent = main.querySelector("details:not([open])") ? "Expand all" : "Collapse all";
  }
  function toggleAll() {
    const open = main.querySelector("details:not([open])") !== null;
    for (const el of main.querySelectorAll("details")) el.open = open;
    nameAll();
  }
  at("all").addEventListener("click", toggleAll);
  main.addEventListener("toggle", oncePerFrame(nameAll), true);

  function goTo(el) {
    location.replace("#" + el.id);
    arrive();
    (el.querySelector(":scope > summary") || main).focus({ preventScroll: true });
  }
  function arrive() {
    const el = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!el || !main.contains(el)) return;
    openAround(el);
    el.scrollIntoView();
    // What was skipped until now has only an estimated height: aim again as it is laid out.
    requestAnimationFrame(() => {
      el.scrollIntoView();
      requestAnimationFrame(() => { el.scrollIntoView(); followSoon(); });
    });
  }
  addEventListener("hashchange", arrive);

  // ---- The outline: built level by level, when a level is first opened.
  const entries = new WeakMap();
  const REWARD = /(?:\s*[·|,:–-])?\s*(?:(?:mean|total|final)\s+)?reward[\s:=]+(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)/i;
  function isSection(el) {
    return el.localName === "section" || (el.localName === "details" && !el.classList.contains("d"));
  }
  function below(el) {
    const found = [];
    for (const child of el.children) {
      if (isSection(child)) found.push(child);
      else if (child.localName === "details") found.push(...below(child));
    }
    return found;
  }
  function make(tag, text) {
    const el = document.createElement(tag);
    if (text !== undefined) el.textContent = text;
    return el;
  }
  function entry(el) {
    const item = make("li"), row = make("div"), link = make("a");
    const title = (el.querySelector(headingSelector) || el.firstElementChild || el).textContent.slice(0, 200);
    const reward = el.dataset.reward || (REWARD.exec(title) || [])[1];
    const label = make("span", title.replace(REWARD, "").trim() || title);
    link.href = "#" + el.id;
    link.title = title;
    link.append(label);
    if (reward !== undefined) link.append(make("b", reward));
    if (el.classList.contains("x")) link.className = "bad";
    const children = below(el);
    const state = { item, row, children, list: null, button: null, byHand: false };
    if (children.length) {
      state.button = make("button");
      state.button.setAttribute("aria-label", "Contents of " + label.textContent);
      state.button.setAttribute("aria-expanded", "false");
      state.button.addEventListener("click", () => { state.byHand = true; expand(state, !isExpanded(state)); });
    }
    row.append(state.button || make("i"), link);
    item.append(row);
    entries.set(el, state);
    return item;
  }
  const isExpanded = (state) => state.list !== null && !state.list.hidden;
  function expand(state, open) {
    if (!state.button) return;
    if (open && !state.list) {
      state.list = make("ul");
      state.list.append(...state.children.map(entry));
      state.item.append(state.list);
    }
    if (state.list) state.list.hidden = !open;
    state.button.setAttribute("aria-expanded", String(open));
  }
  const top = below(main);
  if (top.length) {
    const list = make("ul");
    list.append(...top.map(entry));
    at("outline").append(list);
  }
  const keys = make("div");
  keys.className = "keys";
  for (const [key, does] of [["/", "find"], ["j", "next group"], ["k", "previous group"], ["e", "expand all"]]) {
    const line = make("div");
    line.append(make("kbd", key), " " + does);
    keys.append(line);
  }
  at("outline").append(keys);

  function setOutline(open) {
    page.dataset.outline = open ? "open" : "closed";
    at("menu").setAttribute("aria-expanded", String(open));
  }
  const isOutlineShown = () => getComputedStyle(at("outline")).display !== "none";
  const isNarrow = () => !matchMedia("(min-width: 56rem)").matches;
  at("menu").setAttribute("aria-expanded", String(isOutlineShown()));
  at("menu").addEventListener("click", () => setOutline(!isOutlineShown()));
  at("outline").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    goTo(document.getElementById(link.hash.slice(1)));
    if (isNarrow()) setOutline(false);
  });

  // ---- Where the reader is: asked of the browser by point, so it costs the same on any page.
  let marked = null, followed = null;
  function current() {
    const frame = main.getBoundingClientRect();
    const left = frame.left + Math.min(140, frame.width / 3);
    const head = at("bar").getBoundingClientRect().bottom;
    for (const down of [100, 140, 60, 20, 200]) {
      const el = document.elementFromPoint(left, head + down);
      const section = el && el.closest(sectionSelector);
      if (section) return section;
    }
    return null;
  }
  function follow() {
    const path = [];
    for (let el = current(); el; el = el.parentElement.closest(sectionSelector)) path.unshift(el);
    const first = path.length ? entries.get(path[0]) : undefined;
    if (first !== followed) {
      if (followed && !followed.byHand) expand(followed, false);
      if (first && !first.byHand) expand(first, true);
      followed = first;
    }
    let state;
    for (const el of path) {
      if (!entries.has(el)) break;
      state = entries.get(el);
      if (!isExpanded(state)) break;
    }
    if (state === marked) return;
    if (marked) { marked.row.classList.remove("now"); marked.row.querySelector("a").removeAttribute("aria-current"); }
    marked = state;
    if (!state) return;
    state.row.classList.add("now");
    state.row.querySelector("a").setAttribute("aria-current", "true");
    const nav = at("outline"), box = state.row.getBoundingClientRect(), frame = nav.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom) nav.scrollTop += box.top - frame.top - frame.height / 3;
  }
  const followSoon = oncePerFrame(follow);
  addEventListener("scroll", followSoon, { passive: true });
  addEventListener("resize", followSoon, { passive: true });
  main.addEventListener("toggle", followSoon, true);

  function step(by) {
    const groups = main.querySelector("details.g") ? [...main.querySelectorAll("details.g")] : top;
    if (!groups.length) return;
    const head = at("bar").getBoundingClientRect().bottom;
    const passed = groups.filter((el) => el.getBoundingClientRect().top <= head + 2).length;
    const next = groups[Math.min(Math.max(passed - 1 + by, 0), groups.length - 1)];
    if (next.localName === "details") next.open = true;
    goTo(next);
  }

  // ---- Find: text nodes are searched in slices, so a page of tens of megabytes stays responsive.
  const LIMIT = 10000;
  const box = at("find");
  const canMark = typeof Highlight === "function" && CSS.highlights !== undefined;
  let matches = [], chosen = -1, running = 0, done = true, openedByFind = [];
  function report() {
    const more = matches.length >= LIMIT ? "+" : done ? "" : "…";
    const total = matches.length.toLocaleString("en") + more;
    at("count").textContent = !box.value ? "" : matches.length ? (chosen + 1) + " of " + total : done ? "no match" : "…";
  }
  function rangeOf([node, start, end]) {
    const range = document.createRange();
    range.setStart(node, start);
    range.setEnd(node, end);
    return range;
  }
  function choose(index) {
    if (!matches.length) return report();
    chosen = (index + matches.length) % matches.length;
    const node = matches[chosen][0], range = rangeOf(matches[chosen]);
    for (const el of openedByFind) if (!el.contains(node)) el.open = false;
    openedByFind = openedByFind.filter((el) => el.open).concat(openAround(node));
    if (canMark) CSS.highlights.set("find-now", new Highlight(range));
    else { getSelection().removeAllRanges(); getSelection().addRange(range); }
    node.parentElement.scrollIntoView({ block: "nearest" });
    // Once for the estimate, once more when the text around it has been laid out.
    const centre = () => {
      const spot = range.getBoundingClientRect();
      const top = at("bar").getBoundingClientRect().bottom + 90;
      if (spot.top < top || spot.bottom > innerHeight - 20) scrollBy(0, spot.top - innerHeight * 0.45);
    };
    requestAnimationFrame(() => { centre(); requestAnimationFrame(centre); });
    report();
  }
  function search() {
    const mine = ++running;
    const query = box.value;
    matches = [];
    chosen = -1;
    done = !query;
    if (canMark) { CSS.highlights.delete("find"); CSS.highlights.delete("find-now"); }
    report();
    if (!query) return;
    const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
    const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
    const all = canMark ? new Highlight() : null;
    if (canMark) CSS.highlights.set("find", all);
    const slice = () => {
      if (mine !== running) return;
      const until = performance.now() + 12;
      while (!done && performance.now() < until) {
        const node = walker.nextNode();
        if (!node) { done = true; break; }
        pattern.lastIndex = 0;
        for (let hit; matches.length < LIMIT && (hit = pattern.exec(node.data)); ) {
          const end = hit.index + hit[0].length;
          matches.push([node, hit.index, end]);
          if (all) all.add(new StaticRange({ startContainer: node, startOffset: hit.index, endContainer: node, endOffset: end }));
        }
        done = matches.length >= LIMIT;
      }
      if (chosen < 0 && matches.length) choose(0);
      else report();
      if (!done) setTimeout(slice);
    };
    slice();
  }
  let typing = 0;
  box.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 150); });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); choose(chosen + (event.shiftKey ? -1 : 1)); }
    if (event.key === "Escape") { box.value = ""; search(); main.focus({ preventScroll: true }); }
  });
  at("next").addEventListener("click", () => choose(chosen + 1));
  at("previous").addEventListener("click", () => choose(chosen - 1));

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === box) return;
    const actions = {
      "/": () => { box.focus(); box.select(); },
      "j": () => step(1),
      "k": () => step(-1),
      "e": toggleAll,
      "Escape": () => { if (isNarrow()) setOutline(false); },
    };
    if (!Object.hasOwn(actions, event.key)) return;
    if (event.key !== "Escape") event.preventDefault();
    actions[event.key]();
  });

  nameAll();
  arrive();
  follow();
})();
