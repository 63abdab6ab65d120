"""What the package index is told that depends on where the repository is.

``KJO_REPOSITORY_URL`` is the address of the repository on its forge, such as
``https://forge.example/shop/kjo_django``, when a release is built. The copy of ``README.md`` that
the index shows then links to files of that repository, as they are in the release's tag, and the
metadata names the repository. Without it, links stay relative, and no address is named.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "KJO_REPOSITORY_URL"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")
IMAGE = re.compile(r'(?<=\bsrc=")(?![a-z]+:)([^"]+)(?=")|(?<=\bsrcset=")(?![a-z]+:)([^"]+)(?=")')
PAGES = {
    "Documentation": "docs/index.md",
    "Changelog": "docs/changelog.md",
}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown with its relative links and images at a tag of the repository."""
    text = LINK.sub(lambda found: f"{repository}/blob/{tag}/{found[0]}", text)
    return IMAGE.sub(lambda found: f"{repository}/raw/{tag}/{found[0]}", text)


def urls(repository: str, tag: str) -> dict[str, str]:
    """Return the addresses that the index lists beside the description."""
    pages = {name: f"{repository}/blob/{tag}/{path}" for name, path in PAGES.items()}
    return {"Repository": repository, **pages, "Issues": f"{repository}/issues"}


class RepositoryMetadata(MetadataHookInterface):
    """Adds the description and the addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text()
        metadata["urls"] = {}
        if repository := os.environ.get(VARIABLE, "").rstrip("/"):
            tag = f"v{metadata['version']}"
            text = absolute(text, repository, tag)
            metadata["urls"] = urls(repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
