"use strict";
// The script of the page: draws charts in the colours of the theme, changes axes, sorts, and recomputes times.
let report, axis; // the data and the horizontal axis of the curves; set once `start` has inflated them
let bars; // the times as they were last computed
// By default Plotly offers to share charts through its cloud: keep the data in the page.
const config = {
  displaylogo: false, modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d"],
  showSendToCloud: false, plotlyServerURL: "", topojsonURL: "",
};
const $ = (selector, root = document) => [...root.querySelectorAll(selector)];
const place = key => document.getElementById("chart-" + key);

// -- theme -----------------------------------------------------------------------------------------------------------

function themed(layout) {
  const css = getComputedStyle(document.documentElement), colour = name => css.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line"), automargin: true,
    showspikes: layout.hovermode === "x unified", spikecolor: colour("--soft"), spikedash: "solid",
    spikethickness: -2, // Plotly adds 2 for a white border around the line; this removes the border
  };
  const title = t => ({ ...t, font: { size: 12.5, color: colour("--soft") }, standoff: 12 });
  const dressed = a => ({ ...axis, ...a, title: title(a.title) });
  return {
    margin: { l: 56, r: 12, t: 34, b: 48 } /* above the plot is room for its buttons */, paper_bgcolor: colour("--card"), plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    showlegend: false, // the page has its own, which is quicker to draw with many methods
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12.5 }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
    ...layout, font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink") },
    xaxis: dressed(layout.xaxis), yaxis: { ...dressed(layout.yaxis), showspikes: false },
  };
}

// Break a long text at spaces; Plotly reads names as HTML, in which labels are escaped.
const fold = (text, letters) => text.replaceAll("<br>", " ").replace(RegExp(`((?:&\\w+;|.){1,${Math.floor(letters)}})( +|$)`, "g"), "$1<br>").replace(/<br>$/, "");
const lines = text => text.split("<br>").length;

// A chart grows with the names beside its bars.
function show(key, data, layout) {
  const element = place(key), width = element.clientWidth, letter = 6.5; // pixels, on average
  const bars = data[0]?.orientation === "h" ? data[0].y : [], beside = bars.map(name => fold(name, 0.4 * width / letter));
  if (bars.length) Object.assign(layout.yaxis, { tickmode: "array", tickvals: bars, ticktext: beside });
  const tallest = Math.max(0, ...beside.map(lines)); // bars are equally far apart, so each gets the room of the tallest
  const height = parseFloat(getComputedStyle(element).minHeight) + 16 * Math.max(0, beside.length * tallest - 12);
  element.style.height = height + "px";
  const picture = { name: "png", title: "Download plot as a PNG", icon: Plotly.Icons.camera, click: download };
  const drawn = Plotly.react(element, data, themed({ ...layout, width, height }), { ...config, modeBarButtonsToAdd: [picture] });
  legend(element);
  return drawn;
}

// -- legends ---------------------------------------------------------------------------------------------------------

const named = chart => chart.data.filter(t => t.name && t.showlegend !== false);
const together = (chart, trace) => chart.data.filter(t => t === trace || (t.legendgroup && t.legendgroup === trace.legendgroup));

// List the methods of a chart below it; each button hides a method or shows it again, a double click shows it alone.
function legend(chart) {
  const list = chart.parentElement.querySelector(".legend"), shown = named(chart);
  list.replaceChildren(...(shown.length > 1 ? shown : []).map(trace => {
    const button = document.createElement("button"), { color } = trace.marker ?? trace.line, dash = trace.dash ?? trace.line?.dash;
    button.type = "button";
    button.innerHTML = `<span class="dot" data-dash="${dash}" style="--c:${color}"></span>${trace.name}`; // names are escaped
    button.setAttribute("aria-pressed", trace.visible !== "legendonly");
    button.onclick = () => hide(chart, together(chart, trace), trace.visible !== "legendonly");
    button.ondblclick = () => { hide(chart, chart.data, true); hide(chart, together(chart, trace), false); };
    return button;
  }));
}

function hide(chart, traces, hidden) {
  Plotly.restyle(chart, { visible: hidden ? "legendonly" : true }, traces.map(t => chart.data.indexOf(t)));
  $("button", chart.parentElement.querySelector(".legend")).forEach((button, i) => button.setAttribute("aria-pressed", named(chart)[i].visible !== "legendonly"));
}

// A picture has Plotly's own legend, since it leaves the page.
function download(chart) {
  const { width, height } = chart._fullLayout, taller = height + 20 * named(chart).length;
  const below = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", tracegroupgap: 0, maxheight: 1 };
  const layout = { ...chart.layout, showlegend: named(chart).length > 1, legend: below, height: taller };
  return Plotly.downloadImage({ data: chart.data, layout }, { format: "png", filename: chart.id.slice("chart-".length), scale: 2, width, height: taller });
}

// -- curves ----------------------------------------------------------------------------------------------------------

// Ticks of a logarithmic axis: 1, 2, 5, 10, … if there are few decades and enough room, else powers of ten.
function decades(values, unit, width) {
  const some = values.filter(v => v > 0), ticks = [];
  const low = some.reduce((a, b) => Math.min(a, b), Infinity), high = some.reduce((a, b) => Math.max(a, b), 0);
  const steps = Math.log10(high / low) > Math.min(3, width / 200) ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    ticks.push(...steps.map(step => step * 10 ** power));
  }
  const text = v => { const i = Math.max(0, Math.floor(Math.log10(v * 1.001) / 3)); return +(v / 1e3 ** i).toPrecision(3) + " " + ["", "k", "M", "G", "T", "P", "E"][i] + unit; };
  return { type: "log", tickmode: "array", tickvals: ticks, ticktext: ticks.map(text) };
}

function draw(chart) {
  const keys = Object.keys(chart.x), moves = keys.length > 1, layout = structuredClone(chart.layout), width = place(chart.key).clientWidth;
  // Plotly stores what the reader hid in `visible` of its traces, so it gets the same traces again.
  const named = chart.data.filter(t => t.name), many = named.length > 10; // a box with all of them would be cut off
  const groups = [...new Set(chart.data.map(trace => trace.legendgroup))];
  const places = chart.x[moves ? axis.key : keys[0]]?.map(i => report.lists[i]);
  if (places) chart.data.forEach(trace => { trace.x = places[groups.indexOf(trace.legendgroup)]; });
  if (moves) {
    Object.assign(layout.xaxis, { title: { text: axis.title } });
    Object.assign(layout.xaxis, axis.unit ? decades(places.flat(), axis.unit, width) : { type: "linear" });
    const at = axis.unit ? `%{x:.4~s}${axis.unit}` : many ? "round %{x}" : "", far = at && `<br>at ${at}<extra></extra>`;
    if (far) layout.hovermode = "closest";
    named.forEach(t => { t.hovertemplate = (far ? "%{fullData.name}<br>" : "") + t.meta + far; });
  }
  if (many && layout.hovermode) layout.hovermode = "closest";
  if (!moves && layout.xaxis.type === "log") Object.assign(layout.xaxis, decades(chart.data.flatMap(t => t.x), "B", width));
  return show(chart.key, chart.data, layout);
}

function choose(button) {
  axis = report.axes.find(a => a.key === button.dataset.axis);
  $("#axes button").forEach(b => b.setAttribute("aria-pressed", b === button));
  drawAgain();
}

// -- when to draw ----------------------------------------------------------------------------------------------------

let stale = [], drawing = false; // places of charts that are not drawn yet, or not as they should be now

// How far an element is outside of the window, in pixels.
function away(element) {
  const box = element.getBoundingClientRect();
  return Math.max(0, box.top - innerHeight, -box.bottom);
}

// Draw the nearest chart that waits, unless it is farther away than this; return whether it was drawn.
function drawNext(farthest) {
  stale.sort((a, b) => away(a) - away(b));
  if (!stale.length || away(stale[0]) > farthest) return false;
  const element = stale.shift(), chart = report.charts.find(c => place(c.key) === element);
  if (element.data) Plotly.Fx.unhover(element); // on a touch screen the box would stay
  chart ? draw(chart) : times();
  return true;
}

// Draw what is in the window or one window away, one at a time: it is shown, and can be read, while the others are drawn.
async function drawNear() {
  if (drawing) return;
  drawing = true;
  try {
    while (drawNext(innerHeight)) await new Promise(shown => requestAnimationFrame(() => setTimeout(shown)));
  } catch (why) {
    trouble(why);
  }
  drawing = false;
}

// Draw all charts again: at once those in the window, or as far away as given, and the others when they come near.
function drawAgain(farthest = 0) {
  if (!window.Plotly) return;
  stale = $(".chart");
  while (drawNext(farthest));
  drawNear();
}

// -- times on networks -----------------------------------------------------------------------------------------------

const sum = values => values.reduce((a, b) => a + b, 0);

// Seconds of one run until it reached the target, or null. The same sum as Profile.seconds in Python.
function seconds(run, link, target, factor, model) {
  const last = run[model].findIndex(a => a !== null && a >= target);
  if (last < 0) return null;
  let total = 0;
  for (let i = 0; i <= last; i++) {
    total += (run.down[i] > 0 ? link.latency / 1e3 : 0) + (run.down[i] / link.down + run.up[i] / link.up) * 8e-6;
    total += factor * run.compute[i];
  }
  return total;
}

function mean(method, link, target, factor, model) {
  const all = report.runs.filter(r => r.method === method).map(r => seconds(r, link, target, factor, model));
  return all.includes(null) ? null : sum(all) / all.length;
}

// The part of a method's time on a network that is latency. The same as latency_share in Python.
function latency(method, link) {
  const all = report.runs.filter(r => r.method === method).map(run => {
    const waiting = run.down.filter(d => d > 0).length * link.latency / 1e3;
    const transfer = (sum(run.down) / link.down + sum(run.up) / link.up) * 8e-6;
    return waiting + transfer ? waiting / (waiting + transfer) : 0;
  });
  return sum(all) / all.length;
}

const three = v => v.toFixed(v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2); // digits
function human(s) {
  if (s === null) return "not reached";
  if (s < 0.9995) return three(s * 1e3) + " ms";
  if (s < 59.95) return three(s) + " s";
  const parts = s < 3600 ? [60, 1, "min", "s"] : s < 86400 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
  const small = Math.round(s / parts[1]), ratio = parts[0] / parts[1];
  return `${Math.floor(small / ratio)} ${parts[2]}` + (small % ratio ? ` ${small % ratio} ${parts[3]}` : "");
}

const clock = [1e-3, 1e-2, 0.1, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 43200, 86400, 172800, 432000, 864000, 2592000, 8640000, 31536000];

function times() {
  if (!place("network")) return;
  const [{ layout }] = report.network, ticks = { tickmode: "array", tickvals: clock, ticktext: clock.map(s => human(s).replace(/\.0+ /, " ")) };
  if (!bars || $(".network input").every(i => i.checkValidity() && i.value !== "")) bars = computed(); // not for a half-typed number
  bars.forEach((bar, m) => { bar.visible = place("network").data?.[m].visible; });
  show("network", structuredClone(bars), { ...layout, yaxis: { ...layout.yaxis, ...ticks } });
}

// Fill the table of times from what is entered, and return the bars that show them.
function computed() {
  const read = id => Number(document.getElementById(id).value);
  const links = report.profiles.map((p, i) => ({ name: p.name, down: read(`down-${i}`), up: read(`up-${i}`), latency: read(`latency-${i}`) }));
  const target = read("target") / (report.percent ? 100 : 1), factor = read("factor");
  const [{ data }] = report.network;
  const model = document.getElementById("averaged")?.checked ? "averaged" : "accuracy";
  const table = data.map((_, m) => links.map(link => mean(m, link, target, factor, model)));
  $("#times tbody tr").forEach((row, m) => table[m].forEach((s, i) => {
    const share = latency(m, links[i]), small = document.createElement("small");
    small.textContent = `latency ${Math.round(100 * share)}%`;
    Object.assign(row.cells[i + 1], { textContent: human(s) }).append(small);
    Object.assign(row.cells[i + 1].dataset, { seconds: s ?? "", latency: share });
  }));
  return data.map((trace, m) => ({
    ...trace, name: trace.name + (table[m].every(s => s === null) ? " (not reached)" : ""), y: table[m],
    hovertext: table[m].map(human),
  }));
}

// -- tables ----------------------------------------------------------------------------------------------------------

function sort(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
  const value = row => row.cells[column].dataset.order ?? "";
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // missing values stay at the end
    return sign * (head.classList.contains("text") ? a.localeCompare(b) : a - b);
  };
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  $("th", head.closest("tr")).forEach(th => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}

// -- start -----------------------------------------------------------------------------------------------------------

// What an element holds as base64 of gzip.
function inflate(id, type) {
  const text = document.getElementById(id).textContent;
  const inflated = new Blob([Uint8Array.fromBase64?.(text) ?? decoded(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(inflated, { headers: { "Content-Type": type } });
}

// For browsers that do not have Uint8Array.fromBase64, which came in 2025.
function decoded(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i); // ten times as fast as Uint8Array.from
  return bytes;
}

// Run a script from an address: unlike one in the page, the browser compiles it on another thread.
function run(script) {
  const src = URL.createObjectURL(script);
  return new Promise((onload, failed) => {
    const onerror = () => failed("the browser does not run Plotly");
    document.head.append(Object.assign(document.createElement("script"), { src, onload, onerror }));
  });
}

async function start() {
  const ready = inflate("plotly", "text/javascript").blob().then(run);
  report = await inflate("data", "application/json").json();
  for (const chart of report.charts.filter(c => Object.keys(c.x).length)) chart.data.forEach(t => { t.y = report.lists[t.y]; });
  for (const run of report.runs) for (const [key, list] of Object.entries(run.link)) run[key] = report.lists[list];
  axis = report.axes[0];
  await ready;
  $("#axes button").forEach(button => { button.onclick = () => choose(button); });
  $(".network input").forEach(input => { input.oninput = times; });
  addEventListener("scroll", drawNear, { passive: true });
  stale = $(".chart");
  drawNear();
}

// The table needs no charts.
function trouble(why) {
  const old = typeof DecompressionStream === "undefined";
  const said = old ? "this browser cannot inflate them (it has no DecompressionStream): use one from 2023 or later" : why;
  document.getElementById("trouble").textContent = `The charts are missing: ${said}. The table is complete.`;
  document.documentElement.dataset.charts = "off";
}

const root = document.documentElement;
document.getElementById("theme").onclick = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  drawAgain();
};
// Print in light colours and at one width, then restore the page.
let wide = innerWidth, later, theme;
addEventListener("beforeprint", () => { theme = root.dataset.theme; root.dataset.theme = "light"; root.classList.add("paper"); $("details").forEach(d => { d.open = true; }); drawAgain(Infinity); });
addEventListener("afterprint", () => { root.dataset.theme = theme; root.classList.remove("paper"); drawAgain(); });
addEventListener("resize", () => {
  if (innerWidth === wide) return void drawNear(); // phones change the height while scrolling
  wide = innerWidth;
  clearTimeout(later);
  later = setTimeout(drawAgain, 100);
});
$("#summary th").forEach(head => { head.firstElementChild.onclick = () => sort(head); });
start().catch(trouble);
