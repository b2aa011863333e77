"""Report: one self-contained HTML page, verdict first.

Start at `page.write_report`. `pictures` queries the traces for what is drawn, `timeline` converts
it to lanes and bars; `sections`, `tables`, `predictions` and `devices` turn an `Analysis` into HTML
text, `charts` and `heat` into SVG, `words` formats figures. The page's style and script are
`templates/report.css` and `templates/report.js`.
"""

from disttrain_cli.analysis.report.page import write_report

__all__ = ["write_report"]
