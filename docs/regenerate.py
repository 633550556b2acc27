"""Makes anew what the pages show of the terminal and the browser:  python docs/regenerate.py

Runs each ``$ python -m lazytpu ...`` in the console blocks of `PAGES`, in a folder with ``tutorials/train.py``, and
puts its output below it.  Takes the pictures of the report of a run with a profile.  Makes the table of
how-to/profile.md.  Needs Chromium, playwright and pillow.  What the Python blocks print, ``tests/test_docs.py`` makes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent.resolve()
PAGES = (DOCS / "tutorials/read-the-ir-and-the-hlo.md", DOCS.parent / "README.md")
PROFILE = DOCS / "how-to/profile.md"
_CONSOLE = re.compile(r"(?<=^```console\n)\$ python -m lazytpu .*?(?=^```$)", re.M | re.S)
_TABLE = re.compile(r"(?<=<!-- not run: times differ from run to run -->\n```text\n).*?(?=^```$)", re.M | re.S)


def run(*command: str, folder: Path) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent), "COLUMNS": "120", "LAZYTPU_DISK_CACHE": "0"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines()).strip("\n") + "\n"


def console(block: str, folder: Path) -> str:
    """A block with the present output below each of its commands."""
    made = ""
    for line in block.splitlines():
        if line.startswith("$ "):
            words = shlex.split(line[2:])
            made += f"{line}\n" + run(sys.executable, *words[1:], folder=folder).lstrip("\n")
    return made


def pictures(report: Path) -> None:
    """Takes the pictures of a report, and of that of the demo, which README.md has run beside it."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")

        def take(name: str) -> None:
            page.wait_for_timeout(800)
            path = DOCS / f"_static/report-{name}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)

        page.goto((report.parents[1] / "lazytpu-demo/report.html").as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        take("demo")
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        take("overview")
        page.evaluate("location.hash = 'graph=2&tab=code'")
        page.wait_for_timeout(800)
        page.locator(".pane[data-pane=source] .ln", has_text="weights = scores").click()
        take("code")
        page.evaluate("location.hash = 'graph=2&tab=modules'")
        page.wait_for_timeout(800)
        page.locator("#modules .tabulator-row", has_text="GPT").nth(1).click()
        page.wait_for_timeout(300)
        page.locator("#modules .tabulator-row", has_text="blocks").first.click()
        take("modules")
        page.click("#theme")
        page.evaluate("location.hash = 'graph=2&tab=drawing'")
        take("graph")
        browser.close()


def profile(page: str, folder: Path) -> str:
    """The page with a table of present times."""
    program = next(re.finditer(r"^```python\n(.*?)^```$", page, re.M | re.S))[1]
    (folder / "train.py").write_text(program.rpartition("print(")[0].rstrip() + "\nprint(times)\n")
    return _TABLE.sub(lambda _: run(sys.executable, "train.py", folder=folder), page)


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(DOCS / "tutorials/train.py", folder)
        for page in PAGES:
            page.write_text(_CONSOLE.sub(lambda found: console(found[0], folder), page.read_text()))
        profiled = ["run", "--dump", "graphs", "--profile", "graphs/times/profile", "train.py"]
        run(sys.executable, "-m", "lazytpu", *profiled, folder=folder)
        run(sys.executable, "-m", "lazytpu", "report", "graphs", folder=folder)
        pictures(folder / "graphs/report.html")
        PROFILE.write_text(profile(PROFILE.read_text(), folder))


if __name__ == "__main__":
    main()
