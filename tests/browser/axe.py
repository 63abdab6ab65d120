"""What axe-core finds on a page that people who see, hear or move otherwise could not use.

The copy of axe-core is the one in the package ``axe-core-python``; AXE may name a newer one.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from selenium.webdriver import Chrome

RUN = """
const [rules, done] = arguments;
for (const each of document.querySelectorAll("details")) {
    each.open = true;
}
// Colours that still change would be taken for those of the page.
const ended = document.getAnimations().map((each) => each.finished.catch(() => null));
await Promise.all(ended);
axe.run(rules.length ? { runOnly: rules } : {}).then((found) => done(found.violations));
"""


def violations(browser: Chrome, *rules: str) -> list[str]:
    """Return the rules that the open page breaks, each with an element that does.

    :param rules: those looked at; none: all.
    """
    named = os.environ.get("AXE")
    script = Path(named) if named else files("axe_core_python") / "axe.min.js"
    browser.execute_script(script.read_text())
    return [
        f"{rule['id']} ({rule['help']}): {node['html'][:200]}"
        for rule in browser.execute_async_script(RUN, rules)
        for node in rule["nodes"]
    ]
