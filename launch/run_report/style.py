"""The look of the page: light and dark by the reader's preference, in the fonts of the reader's system."""

from typing import Final

STYLE: Final = """
:root{--bg:#f6f7f8;--panel:#fff;--ink:#1a1f26;--soft:#5c6570;--line:#e3e6ea;--grid:#eceff2;--track:#edf0f3;
--warn:#8a5300;--warnbg:#fff6e5;--k0:#2f6fde;--k1:#d9730d;--k2:#0f9d75;--k3:#b0399a;--k4:#7a5af5;--k5:#8d99a6;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--panel:#151b23;--ink:#e6edf3;--soft:#9aa5b1;--line:#2a323c;
--grid:#232b35;--track:#242c36;--warn:#f0b849;--warnbg:#2a2114;--k0:#6ea8fe;--k1:#f0a35a;--k2:#4fcfa3;--k3:#e283cf;
--k4:#a995ff;--k5:#7d8894}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main,header{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:36px}
h1{font-size:28px;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:19px;margin:0 0 4px;letter-spacing:-.005em}
header p,.lead{color:var(--soft);margin:4px 0 16px;max-width:80ch}
nav{margin:18px 0 4px;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13.5px}
nav a{color:var(--k0);text-decoration:none}nav a:hover{text-decoration:underline}
section{margin:34px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:18px}
.tile,.panel,.chart{background:var(--panel);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 16px}
.tile span{display:block;color:var(--soft);font-size:12.5px}
.tile b{display:block;font-size:22px;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums}
.tile i{display:block;font-style:normal;color:var(--soft);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:14px}
.chart{margin:0;padding:12px 14px 8px}
.chart figcaption{display:flex;justify-content:space-between;gap:12px;font-size:13.5px;font-weight:600;
margin-bottom:4px}
.chart figcaption b{color:var(--k0);font-variant-numeric:tabular-nums}
.chart svg{display:block;width:100%;height:auto;overflow:visible}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .tick{font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,"DejaVu Sans",sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.chart .right{text-anchor:end}.chart .middle{text-anchor:middle}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.tip{fill:transparent}.tip:hover{fill:var(--soft);fill-opacity:.4}
.curve.k0{stroke:var(--k0)}.curve.k1{stroke:var(--k1)}.curve.k2{stroke:var(--k2)}.curve.k3{stroke:var(--k3)}
.curve.k4{stroke:var(--k4)}.curve.k5{stroke:var(--k5)}
.dot.k0{fill:var(--k0)}.dot.k1{fill:var(--k1)}.dot.k2{fill:var(--k2)}.dot.k3{fill:var(--k3)}.dot.k4{fill:var(--k4)}
.dot.k5{fill:var(--k5)}
.m0{fill:var(--k0)}.m1{fill:var(--k0);fill-opacity:.62}.m2{fill:var(--k0);fill-opacity:.3}.m3{fill:var(--track)}
.m4{fill:var(--k1);fill-opacity:.35}.m5{fill:var(--k1);fill-opacity:.7}.m6{fill:var(--k1)}
.chart path[class^=m]{shape-rendering:crispEdges}
.keys,.note,.empty{margin:4px 0;font-size:12.5px;color:var(--soft)}
.key{margin-right:14px;white-space:nowrap}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;
vertical-align:-1px;background:var(--k5)}
.key.k0::before,.bar .k0{background:var(--k0)}.key.k1::before,.bar .k1{background:var(--k1)}
.key.k2::before,.bar .k2{background:var(--k2)}.key.k3::before,.bar .k3{background:var(--k3)}
.key.k4::before,.bar .k4{background:var(--k4)}.key.k5::before,.bar .k5{background:var(--k5)}
.key.m0::before{background:var(--k0)}.key.m1::before{background:var(--k0);opacity:.62}
.key.m2::before{background:var(--k0);opacity:.3}.key.m3::before{background:var(--track)}
.key.m4::before{background:var(--k1);opacity:.35}.key.m5::before{background:var(--k1);opacity:.7}
.key.m6::before{background:var(--k1)}
.charts+.keys{margin-top:12px}
.panel{padding:14px 18px;overflow:auto}
.panel+.panel,.charts+.panel,.panel+.charts{margin-top:14px}
.tall{max-height:460px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px;padding:4px 14px 6px 0;white-space:nowrap}
td{padding:4px 14px 4px 0;border-top:1px solid var(--line);vertical-align:middle;white-space:nowrap}
th.r,td.r{text-align:right}td:last-child,th:last-child{padding-right:0}
td.bar{width:34%;min-width:160px}
.bar div{display:flex;height:9px;border-radius:5px;background:var(--track);overflow:hidden}
.bar div+div{margin-top:3px}
.bar i{display:block;height:100%}
td.ok{color:var(--k2)}td.off{color:var(--warn);font-weight:600}
pre{margin:0;font:12.5px/1.55 var(--mono);white-space:pre;tab-size:2}
.warnings{list-style:none;margin:0;padding:0}
.warnings li{background:var(--warnbg);border-left:3px solid var(--warn);border-radius:4px;padding:8px 14px;margin:8px 0;
overflow-wrap:anywhere}
.schedule svg{display:block;width:100%;min-width:720px;height:auto}
.schedule svg .page{fill:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 22px;margin:0;font-size:13.5px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
footer{max-width:1180px;margin:0 auto;padding:8px 24px 40px;color:var(--soft);font-size:12.5px}
@media print{nav{display:none}.panel,.tall{overflow:visible;max-height:none}}
""".strip()
