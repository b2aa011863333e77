"""Pages for the tests: of a made-up run, with images, and a browser to open them in."""

import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.analyze import analyze_database
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.report import write_report
from disttrain_cli.analysis.report.pictures import pictures_of
from tests.analysis import synthetic

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: A name that would run in a page that does not escape it, in text as in its script's data.
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def png(path: Path) -> Path:
    """A 4 × 4 grey PNG."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes([0, 90, 120, 150, 180] * 4)))
        + chunk(b"IEND", b"")
    )
    return path


def make(folder: Path, spec: synthetic.Synthetic) -> Path:
    """The page of a run that is written into `folder` first."""
    synthetic.write(folder / "traces", spec)
    database = open_database([folder / "traces"])
    images = [png(folder / "step-8 <b>&.png"), folder / "missing.png"]
    analysis = analyze_database(database)
    return write_report(
        analysis, pictures_of(database, analysis.verdict.place.rank), images, folder / "report.html"
    )


class Tab:
    """A page in a browser; `problems` collects what it complains of, and requests that leave it."""

    def __init__(self, browser: Any, page: Path, scheme: str = "light") -> None:
        self.problems: list[str] = []
        self.tab = browser.new_context(
            color_scheme=scheme, viewport={"width": 1240, "height": 900}
        ).new_page()
        self.tab.on(
            "console",
            lambda message: (
                self.problems.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.tab.on(
            "request",
            lambda request: (
                self.problems.append(request.url)
                if not request.url.startswith(("file:", "data:"))
                else None
            ),
        )
        self.tab.goto(page.as_uri())

    def view(self) -> tuple[float, float]:
        """From when to when the timeline shows, in µs."""
        canvas = self.tab.locator("#timeline")
        return float(canvas.get_attribute("data-from")), float(canvas.get_attribute("data-to"))

    def picture(self) -> str:
        """The timeline as drawn, once it has been."""
        self.tab.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return str(self.tab.locator("#timeline").evaluate("canvas => canvas.toDataURL()"))
