"""How answers look in a notebook, in the cells that examples/notebook.ipynb has after it is executed."""

import html
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import lily
from lily.notebook import html_of, in_notebook

pytestmark = pytest.mark.unsanitized
FILE = Path(__file__).parent.parent / "examples" / "notebook.ipynb"


class Watched(NotebookClient):
    """Executes a notebook, and counts how often each cell's output was updated."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "update_display_data":
            self.updates[cell_index] = self.updates.get(cell_index, 0) + 1
        return super().process_message(msg, cell, cell_index)


def execute(notebook: Any) -> dict[int, int]:
    client = Watched(notebook, timeout=60, kernel_name="python3")
    client.updates = {}
    client.execute()
    return client.updates


def shown(cell: Any, kind: str) -> str:
    """Return a cell's only output of a kind."""
    (output,) = [output for output in cell.outputs if "data" in output]
    return str(output["data"][kind])


def test_the_example_is_executed() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    assert all(
        not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell
    )
    updates = execute(notebook)
    cells = {i: cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
    assert not [output for cell in cells.values() for output in cell.outputs if output.output_type == "error"]
    with lily.Model.load(lily.DEMO) as model:
        told = model.generate("Tell me a story about a fox.", max_tokens=120, seed=58)
        done = model.generate("Tell me a story about a hen.", max_tokens=60, seed=4)
    (streamed,) = [i for i, cell in cells.items() if "model.stream" in cell.source]
    assert html.escape(told.text) in shown(cells[streamed], "text/html")
    assert updates[streamed] >= 1
    (whole,) = [cell for cell in cells.values() if "done = model.generate" in cell.source]
    assert html.escape(done.text) in shown(whole, "text/html")
    assert "60 tokens, length" in shown(whole, "text/plain")
    (plot,) = [cell for cell in cells.values() if "def shade" in cell.source]
    assert re.sub(r"<.*?>", "", shown(plot, "text/html")) == html.escape(done.text)


def test_bars_interrupts_and_streams_in_cells() -> None:
    code = [
        "import lily, lily.notebook, lily.progress, _thread, threading\n"
        "lily.progress._DELAY = lily.notebook._SECONDS = 0\n"
        "model = lily.Model.load(lily.DEMO, prefill_chunk=32)",
        "prefix = model.prefill([5] * 64, progress=True)",
        "stream = model.stream([5], stop_tokens=(), max_tokens=4000)\n"
        "threading.Timer(0.3, _thread.interrupt_main).start()\n"
        "try:\n    display(stream)\nexcept KeyboardInterrupt:\n    print('stopped')",
        "print(model.generate('A fox.', max_tokens=5, seed=1))",
        "model.stream('A fox.', max_tokens=5, seed=1)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in code])
    updates = execute(notebook)
    bar = str(notebook.cells[1].outputs)
    assert "Warning" not in bar
    assert "prompt" in bar
    assert "64" in bar
    stopped = notebook.cells[2].outputs
    assert [output.text for output in stopped if output.output_type == "stream"] == ["stopped\n"]
    assert "cut short" in shown(notebook.cells[2], "text/html")
    with lily.Model.load(lily.DEMO) as model:
        chunks = list(model.stream("A fox.", max_tokens=5, seed=1))
    assert notebook.cells[3].outputs[0].text == "".join(chunk.text for chunk in chunks) + "\n"
    assert updates[4] == len(chunks) + 1  # with each chunk, and at the end


def completion(**values: object) -> lily.Completion:
    plain = {"text": "", "tokens": (1,), "finish_reason": "stop", "seed": 7}
    plain |= {"usage": lily.Usage(3, 1, 0), "timings": lily.Timings(0.1, 3, 0.5, 1)}
    return lily.Completion(**plain | values)


def test_what_a_model_writes_is_never_html() -> None:
    evil = "<script>alert(1)</script>\n<b>&amp;"
    shown = html_of(completion(text=evil, reasoning=evil))
    assert shown.count(html.escape(evil)) == 2
    assert "<script" not in shown
    assert "<b>" not in shown
    assert shown == completion(text=evil, reasoning=evil)._repr_html_()


def test_thoughts_are_folded_away_once_there_is_an_answer() -> None:
    assert "<details open" in html_of(completion(reasoning="Hm."))
    assert "<details style" in html_of(completion(reasoning="Hm.", text="So."))
    assert "<details" not in html_of(completion(text="So."))
    assert "3 + 1 tokens, 2.0/s, stop, seed 7" in html_of(completion(text="So."))
    assert "cut short" in html_of(completion(finish_reason=None))


def test_outside_a_notebook_a_stream_is_its_repr() -> None:
    assert not in_notebook()
    with lily.Model.load(lily.DEMO) as model:
        stream = model.stream("A fox.", max_tokens=5)
        with pytest.raises(NotImplementedError):
            stream._ipython_display_()
        assert repr(stream) == "<lily.Stream: 0 tokens, unfinished>"
