"""The style sheet and the script of all pages. The pages print well, in light and dark, on paper
and on a phone.
"""

STYLE = """
:root{--paper:#fcfbf8;--ink:#1b2328;--soft:#57636b;--line:#d9d6cd;--wash:#f2efe7;--a:#0f5c63;--b:#a8500f;--c:#6b3f8f;--d:#2f6b2f;--e:#99254a;--f:#3556a8;--g:#7a6410;
--good:#1f6b3a;--bad:#a3241c;--hold:#8a5a00;--serif:"Iowan Old Style",Charter,"Bitstream Charter","Palatino Linotype",Palatino,Georgia,"DejaVu Serif",serif;
--sans:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans",Arial,sans-serif;--mono:ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace}
@media (prefers-color-scheme:dark){:root{--paper:#15191c;--ink:#e8e6e0;--soft:#a5afb5;--line:#363d42;--wash:#1e2428;--a:#6cc5cb;--b:#f0a35e;--c:#c7a2e6;--d:#8fce8c;--e:#f08fae;--f:#9bb6f5;--g:#dcc462;
--good:#7fd29b;--bad:#ff9d94;--hold:#f0c060}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.55 var(--sans);font-variant-numeric:tabular-nums}
main,.bar>div,footer{max-width:58rem;margin:0 auto;padding:0 1.25rem}
main{padding-bottom:3rem}
h1,h2,.lead,caption,figcaption b{font-family:var(--serif);font-weight:600}h1,h2{text-wrap:balance}
h1{font-size:2.1rem;line-height:1.15;margin:2.2rem 0 .4rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.35rem;margin:2.6rem 0 .6rem;padding-top:.9rem;border-top:1px solid var(--line)}
p{margin:.6rem 0;max-width:42rem}
.over{font-size:.78rem;letter-spacing:.09em;text-transform:uppercase;color:var(--soft);margin:2.2rem 0 -1.6rem}
.lead{font-weight:400;font-size:1.15rem;line-height:1.5;color:var(--ink)}
.soft{color:var(--soft)}.small{font-size:.88rem}
a{color:var(--a);text-underline-offset:.18em}
a:focus-visible,button:focus-visible,input:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:3px solid var(--a);outline-offset:2px;border-radius:3px}
code,.hash{font-family:var(--mono);font-size:.86em;overflow-wrap:anywhere}.option{white-space:nowrap}
.skip{position:absolute;left:-99rem;top:0;background:var(--paper);padding:.6rem 1rem;z-index:2}.skip:focus{left:.5rem}
.unseen{position:absolute!important;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.bar{border-bottom:1px solid var(--line);background:var(--wash)}
.bar>div{display:flex;gap:.2rem 1.4rem;align-items:baseline;flex-wrap:wrap;padding-top:.7rem;padding-bottom:.7rem}
.bar b{font-family:var(--serif);font-size:1.1rem;margin-right:auto}.bar ul{display:flex;gap:1.2rem;list-style:none;margin:0;padding:0}
.bar a{text-decoration:none;padding:.45rem 0;display:inline-block}.bar a[aria-current]{font-weight:600;box-shadow:0 2px 0 var(--a)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1px;margin:1.5rem 1px;padding:0}
.figures div{outline:1px solid var(--line);padding:.8rem 1rem;display:flex;flex-direction:column-reverse;justify-content:flex-end}
.figures dt{color:var(--soft);font-size:.84rem;line-height:1.35}.figures dd{margin:0;font:600 1.55rem/1.2 var(--serif);overflow-wrap:anywhere}
.main.figures{grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));margin-bottom:0}.main.figures dd{font-size:2.1rem}.main.figures+.figures{margin-top:1px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:0 2rem;margin:1rem 0}
.facts div{display:flex;justify-content:space-between;gap:1rem;border-bottom:1px solid var(--line);padding:.34rem 0}
.facts .long{grid-column:1/-1}.facts dt{color:var(--soft)}.facts dd{margin:0;text-align:right;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;width:100%;font-size:.92rem}
caption{text-align:left;padding:0 0 .4rem;font-size:1rem}
th,td{text-align:left;padding:.42rem .9rem .42rem 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--soft);font-weight:500;border-bottom-color:var(--soft);white-space:nowrap}tbody th{font-weight:500}
.sort a{display:inline-block;padding:.3rem 0}.sort a[aria-current]{font-weight:600;text-decoration:none;color:var(--ink)}.when{white-space:nowrap}td .small,th .small{display:block}td .why{min-width:12rem}.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 2rem;align-items:center}.pair thead th{white-space:normal}.number{text-align:right;white-space:nowrap}th.number:last-child,td.number:last-child{padding-right:0}
@media screen and (max-width:36rem){.short,.short tbody,.short tr,.short th,.short td{display:block}.short thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}.short tr{border-bottom:1px solid var(--soft);padding:.4rem 0}.short td,.short th{border:0;padding:.12rem 0;text-align:left;white-space:normal;overflow-wrap:anywhere}.short td[data-of]{display:flex;justify-content:space-between;gap:1rem;text-align:right}.short td[data-of]::before{content:attr(data-of);color:var(--soft);text-align:left;flex:none}.short caption{display:block}}
figure{margin:1.2rem 0}figcaption{margin-bottom:.3rem}figcaption b{display:block;font-size:1rem}figcaption span{color:var(--soft);font-size:.88rem}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,17rem),1fr));gap:0 1.6rem}
svg{display:block;width:100%;height:auto;overflow:visible}svg text{font-family:var(--sans);font-size:12px;fill:var(--soft)}svg .name{paint-order:stroke;stroke:var(--paper);stroke-width:5px;stroke-linejoin:round}
.square svg.wide,.square svg.narrow{max-width:27rem}.narrow{display:none}@media (max-width:36rem){.wide{display:none}.narrow{display:block}h1{font-size:1.65rem}h2{font-size:1.2rem}.figures,.main.figures{grid-template-columns:1fr 1fr}.figures dd,.main.figures dd{font-size:1.25rem}.main.figures div:first-child{grid-column:1/-1}}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}.dash{stroke-dasharray:6 5}.dot{stroke-dasharray:2 4}.whisker{stroke-width:1.4}.band{stroke-width:7;stroke-linecap:round;opacity:.3}
.s0{stroke:var(--a)}.s1{stroke:var(--b)}.s2{stroke:var(--c)}.s3{stroke:var(--d)}.s4{stroke:var(--e)}.s5{stroke:var(--f)}.s6{stroke:var(--g)}.s7{stroke:var(--soft)}
.f0{fill:var(--a)}.f1{fill:var(--b)}.f2{fill:var(--c)}.f3{fill:var(--d)}.f4{fill:var(--e)}.f5{fill:var(--f)}.f6{fill:var(--g)}.f7{fill:var(--soft)}
.empty{fill:var(--wash);stroke:var(--line)}.area{opacity:.16;stroke:none}.gap{stroke:var(--paper);stroke-width:1}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;list-style:none;margin:.4rem 0 0;padding:0;font-size:.88rem}.legend svg{display:inline-block;width:26px;height:10px;margin-right:.45rem}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--a);padding:.35rem 0;width:max-content;max-width:100%}
.list li{margin:.45rem 0;max-width:42rem}
.state{display:inline-block;font-weight:600;white-space:nowrap}.state::before{content:"";display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.45em;background:currentColor}
.badge .state{border:1px solid currentColor;border-radius:1em;padding:0 .65em 0 .5em}
.running{color:var(--a)}.finished,.answered{color:var(--good)}.interrupted,.ended,.paused{color:var(--hold)}.refused,.alarm{color:var(--bad)}
.running::before{animation:breathe 2.4s ease-in-out infinite}@keyframes breathe{50%{opacity:.25}}
@media (prefers-reduced-motion:reduce){*{animation:none!important;transition:none!important}}
button{font:600 1rem var(--sans);color:var(--paper);background:var(--a);border:1px solid var(--a);border-radius:5px;padding:.6rem 1.1rem;min-height:2.75rem;cursor:pointer;margin:.25rem .4rem .25rem 0}button+button{color:var(--a);background:var(--paper)}
input[type=password]{font:1rem var(--mono);color:var(--ink);background:var(--paper);border:1px solid var(--soft);border-radius:5px;padding:.55rem .7rem;min-height:2.75rem;width:100%;max-width:26rem}
input[type=checkbox]{width:1.25rem;height:1.25rem;accent-color:var(--a);vertical-align:middle;margin:.2rem}
form .field{display:grid;gap:.3rem;margin:.8rem 0}
.note{border-left:3px solid var(--hold);padding:.2rem 0 .2rem 1rem;margin:1rem 0}.note.bad{border-color:var(--bad)}
.sign{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:2.6rem 2rem;margin:3rem 0 1rem}.sign div{border-top:1px solid var(--ink);padding-top:.3rem;font-size:.88rem;color:var(--soft)}
footer{color:var(--soft);font-size:.85rem;padding-bottom:2rem}
@media print{:root{--paper:#fff;--wash:#fff;--ink:#000;--soft:#444;--line:#bbb;--a:#0f5c63;--b:#a8500f;--c:#6b3f8f;--d:#2f6b2f;--e:#99254a;--f:#3556a8;--g:#7a6410;--good:#1f6b3a;--bad:#a3241c;--hold:#8a5a00}@page{size:A4;margin:18mm 17mm}body{font-size:10pt}main{max-width:none;padding:0}
*{print-color-adjust:exact}.over{margin:0}h1{font-size:20pt;margin-top:.2rem}.sign{grid-template-columns:1fr 1fr 1fr}h2{font-size:13pt;break-after:avoid}figure,.figures,.sign,tr,li,.facts div{break-inside:avoid}.bar,.skip,details,.screen{display:none}.scroll{overflow:visible}.pair{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}.sign{break-before:avoid}
.narrow{display:none}.wide{display:block}.area{opacity:.3}a{color:inherit;text-decoration:none}}
"""  # noqa: E501

SCRIPT = """
"use strict";
const news = document.getElementById("news");
function announce(words) { if (words && news.textContent !== words) news.textContent = words; }
function put(region, text) {
  const ids = what => [...region.querySelectorAll(what)].map(e => e.id);
  const open = ids("details[open]"), chosen = ids("input:checked"), focus = region.contains(document.activeElement) ? document.activeElement.id : "";
  const typed = [...region.querySelectorAll("input[type=password]")].map(e => [e.id, e.value]);
  const places = [...region.querySelectorAll(".scroll")].map(e => e.scrollLeft);
  region.innerHTML = text;
  for (const id of open) { const e = document.getElementById(id); if (e) e.open = true; }
  for (const [id, value] of typed) { const e = document.getElementById(id); if (e) e.value = value; }
  for (const id of chosen) { const e = document.getElementById(id); if (e) e.checked = true; }
  [...region.querySelectorAll(".scroll")].forEach((e, i) => { e.scrollLeft = places[i] || 0; });
  if (focus) { const e = document.getElementById(focus); if (e) e.focus({preventScroll: true}); }
}
function follow(region) {
  let source = null;
  function open() {
    source = new EventSource(region.dataset.from);
    source.onmessage = event => {
      if (event.lastEventId !== region.dataset.was) put(region, event.data);
      region.dataset.was = event.lastEventId;
      const state = region.querySelector("[data-state]");
      if (state) announce(state.dataset.state);
    };
    source.onerror = () => {
      close();
      announce("This page's server does not answer; trying again.");
      setTimeout(() => { if (!source && !document.hidden) open(); }, 1000);
    };
  }
  function close() { if (source) source.close(); source = null; }
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else if (!source) open(); });
  addEventListener("pagehide", close);
  if (!document.hidden) open();
}
for (const region of document.querySelectorAll("[data-from]")) follow(region);
"""  # noqa: E501
