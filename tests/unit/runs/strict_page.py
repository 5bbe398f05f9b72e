"""A page of HTML, parsed strictly."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "path", "circle", "rect"}


class Page(HTMLParser):
    """Parses a page strictly: every tag must close, in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]
