"""What leaves for a terminal: text is shown, never obeyed."""

from __future__ import annotations

import logging

import pytest

from etude.cli.main import main
from etude.cli.output import print_table, say, show_log, visible
from etude.errors import DataError

EVIL = "a\x1b[31mb\x9bc\rd\x07e\u202ef\x00g"
SHOWN = r"a\x1b[31mb\x9bc\rd\x07e\u202ef\x00g"


def test_control_characters_are_written_out_and_plain_text_stays() -> None:
    assert visible(EVIL) == SHOWN
    plain = "tab\tline\nGr\u00fc\u00dfe \u6f22\u5b57 \U0001f916"
    assert visible(plain) == plain
    assert visible("\udcff") == r"\udcff"  # a file name that is no UTF-8, which could not be printed at all


def test_every_way_out_shows_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    say(EVIL)
    print_table(["name"], [[EVIL + "\nnext"]])
    logger = logging.getLogger("etude")
    monkeypatch.setattr(logger, "handlers", [])
    show_log()
    logger.warning("%s", EVIL)

    def fail(**_: object) -> None:
        raise DataError(EVIL)

    monkeypatch.setattr("etude.cli.main.app", fail)
    with pytest.raises(SystemExit, match="3"):
        main()
    out, err = capsys.readouterr()
    assert (out + err).count(SHOWN) == 4
    assert "\\nnext" in out
    assert not any(mark in out + err for mark in "\x1b\x9b\r\x07\u202e\x00")
