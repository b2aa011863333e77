"""The report: one HTML page that needs nothing else, verdict first.

Start at `page.write_report`. `pictures` asks the traces for what is drawn, `timeline` makes lanes
and bars of it; `sections`, `tables`, `predictions` and `devices` turn an `Analysis` into text,
`charts` and `heat` into SVG, `words` says figures. The page's style and script are
`templates/report.css` and `templates/report.js`.
"""

from disttrain_cli.analysis.report.page import write_report

__all__ = ["write_report"]
