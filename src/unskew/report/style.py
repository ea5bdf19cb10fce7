"""The stylesheet of the report: the dashboard's colours, light or dark by the reader's setting, and on paper."""

STYLE = """
:root { color-scheme: light dark; --page: light-dark(#f5f7fa, #0e131a); --card: light-dark(#fff, #161d27);
  --line: light-dark(#dfe4eb, #28323f); --text: light-dark(#18202c, #e4e9f0); --muted: light-dark(#5a6675, #9aa7b8);
  --accent: light-dark(#2f5bd0, #8fb0ff); --good: light-dark(#0a6b4c, #5fd0a6); --bad: light-dark(#a1242d, #f59aa0);
  --ask: light-dark(#a04408, #f6ab6c); --slow: #e0762b; --fast: #3b86cc; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
.brand { display: flex; justify-content: space-between; margin: 0; font-weight: 650; color: var(--accent); }
.brand span { font-weight: 400; color: var(--muted); font-size: .87rem; }
h1 { font-size: 1.55rem; margin: .2rem 0 .3rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.02rem; margin: 0 0 .7rem; }
h2 small { font-weight: 400; color: var(--muted); margin-left: .6rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; font-weight: 620; }
.facts { margin: 0 0 .5rem; color: var(--muted); }
.facts span:not(:last-child)::after { content: "·"; margin: 0 .5rem; }
code { display: block; padding: .5rem .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  font-size: .85rem; overflow-x: auto; white-space: nowrap; }
.outcome { margin: 1rem 0 0; padding: .9rem 1.1rem; border-radius: .5rem; background: var(--card); font-size: 1.12rem;
  font-weight: 600; border: 1px solid var(--line); border-left: 5px solid currentColor; }
section { margin-top: 1.1rem; padding: 1rem 1.1rem 1.1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; break-inside: avoid; }
.card { padding: .1rem 0 .1rem .9rem; border-left: 3px solid var(--muted); }
.card + .card { margin-top: 1rem; }
.card p { margin: 0; color: var(--muted); font-size: .92rem; }
.card.bad { border-color: var(--bad); } .card.good { border-color: var(--good); } .card.ask { border-color: var(--ask); }
.card.over h3 { font-weight: 500; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: .5rem 0 0; }
dt { color: var(--muted); font-size: .82rem; } dd { margin: 0; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .quiet { color: var(--muted); }
.card, .card h3 { color: var(--text); }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--muted); } svg .label, svg .value { fill: var(--text); }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; } .measured { stroke: var(--accent); stroke-width: 1.8; }
.predicted { stroke: var(--muted); stroke-width: 1.4; stroke-dasharray: 4 3; }
rect.slow { fill: var(--slow); } rect.fast { fill: var(--fast); }
.mark line { stroke-width: 1.2; stroke-dasharray: 2 3; } .mark.verdict { stroke: var(--slow); fill: var(--slow); }
.mark.plan { stroke: var(--good); fill: var(--good); }
.key { margin: .5rem 0 0; color: var(--muted); font-size: .85rem; padding-left: 6%; }
.key i { display: inline-block;
  width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .4rem 0 .9rem; vertical-align: -.08rem; }
.key i:first-child { margin-left: 0; }
i.measured { background: var(--accent); }
i.predicted { background: var(--muted); } i.verdict, i.slow { background: var(--slow); }
i.plan { background: var(--good); } i.fast { background: var(--fast); }
.p-data { fill: #8f6fd0; background: #8f6fd0; } .p-forward { fill: #5b86f0; background: #5b86f0; }
.p-backward { fill: #2f5bd0; background: #2f5bd0; } .p-weights { fill: #1f3f94; background: #1f3f94; }
.p-waiting { fill: #c3ccd8; background: #c3ccd8; } .p-optimizer { fill: #2a9d78; background: #2a9d78; }
.p-other { fill: #d9a441; background: #d9a441; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; }
td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
td:nth-child(-n+2) { color: var(--muted); white-space: nowrap; } td:last-child { overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
@media print { body { background: #fff; } section { border-color: #ccc; } }
"""
