// What a page looks like once it is drawn, frame by frame; written as JSON into #found.

const ODD = /\b(NaN|None|undefined|Infinity|-?inf|nan|null|True|False|object Object)\b/g;
const MAX_NAMED = 8;

function rgba(text) {
  const parts = text.match(/[\d.]+/g).map(Number);
  return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
}

function over(top, below) {
  const a = top[3];
  return [0, 1, 2].map((i) => a * top[i] + (1 - a) * below[i]);
}

function luminance(colour) {
  const [r, g, b] = colour.map((c) => {
    c /= 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + 0.05) / (dark + 0.05);
}

function paint(element, style, what) {
  const colour = rgba(style[what]);
  colour[3] *= Number(style[`${what}Opacity`]) * Number(style.opacity);
  return colour;
}

// What lies below the text of an element at a point: fills and thick lines, back to front.
function background(view, element, x, y, paper) {
  const stack = view.document.elementsFromPoint(x, y);
  const below = stack.slice(stack.indexOf(element) + 1).reverse();
  let colour = paper;
  for (const other of below) {
    const style = view.getComputedStyle(other);
    if (!(other instanceof view.SVGElement) || other.tagName === "svg") {
      colour = over(rgba(style.backgroundColor), colour);
    } else if (style.fill !== "none") {
      colour = over(paint(other, style, "fill"), colour);
    } else if (style.stroke !== "none" && parseFloat(style.strokeWidth) >= 5) {
      colour = over(paint(other, style, "stroke"), colour);
    }
  }
  return colour;
}

function texts(view) {
  const body = view.document.body;
  const walker = view.document.createTreeWalker(body, view.NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.textContent.trim() || node.parentElement.closest("title, desc, style")) continue;
    const range = view.document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.width && box.height) found.push({ node, element: node.parentElement, box });
  }
  return found;
}

function named(list) {
  return list.length > MAX_NAMED ? [...list.slice(0, MAX_NAMED), `${list.length} in all`] : list;
}

function faint(view, found, paper) {
  const bad = [];
  let measured = 0;
  for (const { node, element, box } of found) {
    const style = view.getComputedStyle(element);
    const svg = element instanceof view.SVGElement;
    const ink = svg ? paint(element, style, "fill") : rgba(style.color);
    let least = 99, seen = "";
    for (const x of [box.left + 2, (box.left + box.right) / 2, box.right - 2]) {
      const y = (box.top + box.bottom) / 2;
      const hit = view.document.elementsFromPoint(x, y);
      if (!hit.includes(element)) continue; // scrolled out of its card
      const below = background(view, element, x, y, paper);
      const ratio = contrast(over(ink, below), below);
      if (ratio < least) [least, seen] = [ratio, `${ink.map(Math.round)} on ${below.map(Math.round)}`];
    }
    if (least < 99) measured += 1;
    if (least < 4.5) bad.push(`${node.textContent.trim()}: ${least.toFixed(2)} (${seen})`);
  }
  return { bad, measured };
}

function overlaps(view) {
  const bad = [];
  for (const svg of view.document.querySelectorAll("svg[role=img]")) {
    const around = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], i) => {
      if (box.left < around.left - 1 || box.right > around.right + 1 ||
          box.top < around.top - 1 || box.bottom > around.bottom + 1) {
        bad.push(`${text.textContent} leaves "${svg.getAttribute("aria-label")}"`);
      }
      for (const [other, its] of boxes.slice(i + 1)) {
        const x = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const y = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (x > 1 && y > 3) bad.push(`${text.textContent} over ${other.textContent}`);
      }
    });
  }
  return bad;
}

function measure(frame) {
  const view = frame.contentWindow;
  const page = view.document;
  page.querySelectorAll("details").forEach((details) => { details.open = true; });
  frame.style.height = `${page.documentElement.scrollHeight + 50}px`;
  const root = page.documentElement;
  const paper = rgba(view.getComputedStyle(page.body).backgroundColor).slice(0, 3);
  const found = texts(view);
  const { bad, measured } = faint(view, found, paper);
  const drawings = [...page.querySelectorAll("svg")].filter((svg) => {
    const box = svg.getBoundingClientRect();
    return !box.width || !box.height || !svg.querySelector("path, rect, polyline, circle, line");
  });
  return {
    page: frame.dataset.page,
    width: frame.dataset.width,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches && luminance(paper) < 0.2,
    overflows_px: Math.max(0, root.scrollWidth - root.clientWidth),
    faint: named(bad),
    num_texts: measured,
    empty_drawings: named(drawings.map((svg) => svg.outerHTML.slice(0, 120))),
    odd: named([...new Set(page.body.textContent.match(ODD) || [])]),
    overlaps: named(overlaps(view)),
    wide: named([...page.querySelectorAll(".card")]
      .filter((card) => card.scrollWidth > card.clientWidth && card.querySelector("svg[role=img]"))
      .map((card) => card.querySelector("svg[role=img]").getAttribute("aria-label"))),
    requests: named(view.performance.getEntriesByType("resource").map((entry) => entry.name)),
  };
}

window.addEventListener("load", () => {
  const frames = [...document.querySelectorAll("iframe")];
  document.getElementById("found").textContent = JSON.stringify(frames.map(measure));
});
