"""A second turn takes in what is new, whatever template and client do to the first; the docs say how much."""

import pytest

import reuse

pytestmark = pytest.mark.unsanitized  # the core does nothing new in it


@pytest.fixture(scope="module")
def table() -> list[reuse.Row]:
    return list(reuse.rows())


def test_a_second_turn_takes_in_little_more_than_is_new(table: list[reuse.Row]) -> None:
    assert len(table) == 32
    for row in table:
        assert row.cached <= row.common, row
        assert row.prefilled == row.prompt - row.cached < 64 + row.new, row


def test_what_was_written_is_new_only_where_the_template_shows_it_otherwise(table: list[reuse.Row]) -> None:
    for row in table:
        # Thoughts are gone from the prompt if the client leaves them out. They are too if the template drops
        # them, which it does once a person asks again; a tool's answer is no question.
        kept = row.preserve or row.turn != "text"
        same = kept and (row.echoed or not row.thinking)
        assert (row.spliced > 0) == same, row
        assert (row.new < 30) == same, row


def test_the_docs_have_the_table(table: list[reuse.Row]) -> None:
    page = reuse.PAGE.read_text()
    assert reuse.with_table(page, table) == page, "python tests/reuse.py writes it"
