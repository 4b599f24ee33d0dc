"""A hook for mkdocs that replaces links to files outside docs/ by the files' paths in the repository, as text.

Such links work in a checkout and on a code host, but not on a site that has only docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?:)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs") and (target.suffix != ".json" and target.is_file()):
            return link[0]
        return (
            f"{link[1]} (`{target.relative_to(ROOT)}`)" if link[1] != str(target.relative_to(ROOT)) else f"`{link[1]}`"
        )

    return LINK.sub(shown, markdown)
